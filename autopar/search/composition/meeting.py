"""Meetings of examples in the record of a pipeline: works between its forward and its backward passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.ir import Graph
from autopar.ir.analysis import names_read
from autopar.microbatch import Joined, Microbatching
from autopar.plan import Stage
from autopar.schedule import ValueRef, ValueSpec, Work, WorkSpec
from autopar.stages import StageParts


def met_name(name: str) -> str:
    """Name in the record of a value that is sent where examples meet."""
    return str(ValueRef("met", name))


@dataclass(frozen=True)
class StageMeeting:
    """A stage's work where examples meet; empty where it has no part in it.

    Args:
        graph: the whole step.
        part: what the stage does.
        stage: its plan.
        microbatching: the microbatches of the step.
    """

    graph: Graph
    part: StageParts
    stage: Stage
    microbatching: Microbatching

    @property
    def joined(self) -> tuple[Joined, ...]:
        """Values of microbatches that the stage brings."""
        read = self._read_by(self.microbatching.between)
        return tuple(j for j in self.part.joined if j.name in read)

    @property
    def terms(self) -> tuple[str, ...]:
        """The value that stands for all of them; none where there are none."""
        return (str(ValueRef("terms", stage=self.part.stage)),) if self.joined else ()

    @property
    def taken(self) -> tuple[str, ...]:
        """Values that the backward passes of the stage read."""
        read = self._read_by(self.part.body)
        return tuple(met_name(r.name) for r in self.part.received_met if r.name in read)

    def values(self) -> Iterator[ValueSpec]:
        """Its operands and results, with bytes a device."""
        devices, count, types = len(self.stage.devices), self.microbatching.count, self.graph.types
        for name in self.terms:
            # A microbatch brings its piece of what is stacked, and a term as large as all of what is added up.
            stacked = sum(types[j.name].nbytes for j in self.joined if not j.layout.partial) / count
            added = sum(types[j.name].nbytes for j in self.joined if j.layout.partial)
            nbytes = math.ceil((stacked + added) / devices)
            yield ValueSpec(name, nbytes, "accumulator", reduce="concatenate" if stacked > added else "sum")
        for n in self.part.sent_met:
            yield ValueSpec(met_name(n), math.ceil(types[n].nbytes / devices), "step")

    def works(self) -> list[WorkSpec]:
        """Its works, by part."""
        part_of = {id: self.part.part_of[id] for id in self.part.between}
        here = {v.name: part_of[id] for id in part_of for v in self.graph.by_id[id].results}
        at = {n: here.get(n, 0) for n in self.part.sent_met}
        numbers = sorted({*at.values(), *part_of.values()})
        works = []
        for k in numbers:
            read = self._read_by(id for id, n in part_of.items() if n == k)
            names = [r.name for r in self.part.received_met if r.name in read and r.name not in here]
            terms = self.terms if k == numbers[0] else ()
            written = [n for n in self.part.sent_met if at[n] == k]
            reads = (*terms, *map(met_name, names))
            works.append(WorkSpec(Work("meeting", self.part.stage, k), reads, tuple(map(met_name, written))))
        return works

    def seconds(self) -> dict[Work, float]:
        """Seconds of its works: of the last, which has everything, all of them."""
        works = [spec.work for spec in self.works()]
        return {work: dict(self.stage.work_times).get("meeting", 0.0) if work == works[-1] else 0.0 for work in works}

    def _read_by(self, ids: Iterable[str]) -> set[str]:
        return names_read(self.graph.by_id[id] for id in ids)
