"""The trail of a search: what became of the regions of the decision. `autopar.plan.alternatives` tells of it.

A region is a set of plans: some of what is free is decided, the rest is not. A row has one region, or several that
differ in few parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

#: Outcomes of a region.
PLANNED, BOUNDED, TOO_LARGE, IMPOSSIBLE, LEFT_OUT = "planned", "bounded", "too large", "impossible", "left out"


class TrailRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Regions that were closed.

    Args:
        form: "one stage", "pipeline" or "branches".
        outcome: "planned"; "bounded": by a bound or an estimate none is faster than the best plan; "too large" for the
            memory; "impossible"; "left out" by a rule of the enumeration, of which nothing is known.
        stages: ranges of their number, both ends included; empty where it is free.
        microbatches: their numbers; likewise.
        schedule: its name; "" where it is free.
        remat: what is recomputed; "" where it is free.
        how: other parts of the form in words.
        seconds: of the fastest plan of a step, where it is planned.
        estimate_s: seconds that a relaxation expected of it before it was planned; None where none did.
        least_s: seconds of a step that no plan of the region is below, or is estimated to be below.
        missing_bytes: bytes a device above the memory limit, of the region that came nearest; None where not known.
        why: what closed it: the bound, where memory is short, why it is impossible. Of what was planned the relaxation
            whose estimate is given.
        work: work units that it took.
        regions: number of them.
    """

    form: str
    outcome: str
    stages: tuple[tuple[int, int], ...] = ()
    microbatches: tuple[int, ...] = ()
    schedule: str = ""
    remat: str = ""
    how: str = ""
    seconds: float | None = None
    least_s: float | None = None
    missing_bytes: int | None = None
    why: str = ""
    work: int = 0
    regions: int = 1
    estimate_s: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Order of rows that tell about the same: plans first, the fastest before others."""
        order = (PLANNED, BOUNDED, TOO_LARGE, IMPOSSIBLE, LEFT_OUT)
        value = {PLANNED: self.seconds, BOUNDED: self.least_s, TOO_LARGE: self.missing_bytes}.get(self.outcome)
        return order.index(self.outcome), float("inf") if value is None else float(value)


def stages_text(numbers: Iterable[int]) -> str:
    """``stage 3``, or ``stages 0-3, 5``."""
    ranges = ranges_of(numbers)
    return f"stage{'s' * (len(ranges) > 1 or ranges[0][0] < ranges[0][1])} {ranges_text(ranges)}"


def ranges_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as ranges, rising, both ends included."""
    ranges: list[tuple[int, int]] = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), lambda at: at[1] - at[0]):
        some = [n for _, n in run]
        ranges.append((some[0], some[-1]))
    return tuple(ranges)


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges as text: ``1, 2, 5-9``."""
    parts: list[str] = []
    for first, last in ranges:
        parts += [f"{first}-{last}"] if last - first > 1 else map(str, range(first, last + 1))
    return ", ".join(parts)
