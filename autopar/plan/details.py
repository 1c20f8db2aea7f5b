"""`Details`: what a plan's outputs show besides its decisions: lines of the source, forms of operators, a timeline.

Plans are equal whatever their details are, and a plan without any is as good.
"""

from __future__ import annotations

from typing import Final

import msgspec

from autopar.plan.trail import TrailRow


class OperatorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An operator as people read it.

    Args:
        id: the operator, as in its record.
        source: the user's line, as ``file.py:12 (function)``; "" where it is not known.
        form: einsum-like form with the types: ``ab,bc->ac  f32[8,64] f32[64,32] -> f32[8,32]``.
        stages: stages in whose graphs it is; empty in a plan of one stage.
    """

    id: str
    source: str = ""
    form: str = ""
    stages: tuple[int, ...] = ()


class TimelineSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that takes time in the only stage.

    Args:
        name: the operator, or the collective with its bytes.
        resource: "compute", or the class of links: "intra" or "inter".
        start_s: seconds from the beginning of the step.
        end_s: when it is over.
    """

    name: str
    resource: str
    start_s: float
    end_s: float


class MemoryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes a device by kind from a time on."""

    time_s: float
    bytes: dict[str, int]


class Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Details of a plan.

    Args:
        operators: operators of the step; of several stages those of choices, which are of the stages' own graphs.
        slices: the timeline of a plan of one stage, in order of time.
        memory: bytes a device over it.
        work: work units of the search by kind of work; see `autopar.search.clock`. A plan that was loaded keeps them.
        trail: what became of the regions of the decision; likewise.
    """

    operators: tuple[OperatorDetail, ...] = ()
    slices: tuple[TimelineSlice, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    work: tuple[tuple[str, int], ...] = ()
    trail: tuple[TrailRow, ...] = ()

    @property
    def saved(self) -> Details:
        """The details that a plan's file gets: all of them if the operators are known, else none."""
        return self if self.operators else NO_DETAILS

    def of(self, name: str, stage: int = 0) -> OperatorDetail | None:
        """The detail of an operator of a stage, by id."""
        return next((d for d in self.operators if d.id == name and (not d.stages or stage in d.stages)), None)


#: Of a plan that has none.
NO_DETAILS: Final[Details] = Details()
