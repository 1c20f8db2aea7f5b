"""`AmpStage`: what one stage of AMPNet has, and its passes and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.runtime.interpreter import Worker
from autopar.schedule import NONE, Accumulate, Apply, Buffer, Free, Kind, Run, Stash, Task, WorkSpec
from autopar.schedule.ampnet import AmpFlow
from autopar.schedule.stale_flow import METRICS, SHARED, STATE


def may_begin(flow: AmpFlow, stages: Sequence[AmpStage], stage: AmpStage) -> bool:
    """Whether the next key of a stage is within the number that may be under way."""
    return stage.begun < min(flow.microbatches, min(s.done for s in stages) + flow.most_active)


def choice(flow: AmpFlow, stages: Sequence[AmpStage], stage: AmpStage) -> Kind | None:
    """The pass that a stage takes next; None where it has to wait."""
    if stage.has("backward"):
        return "backward"
    return "forward" if may_begin(flow, stages, stage) and stage.has("forward") else None


def deliver(stages: Sequence[AmpStage], sent: Sequence[tuple[int, Buffer, Any]]) -> None:
    """Puts what a pass sends where it is read."""
    for to, buffer, array in sent:
        stages[to].inbox[buffer] = array


class AmpStage:
    """A stage during a call.

    Args:
        number: of the stage.
        flow: what is carried out.
        worker: carries instructions out; its inputs lie there.
    """

    def __init__(self, number: int, flow: AmpFlow, worker: Worker) -> None:
        self.number, self.flow, self.worker = number, flow, worker
        self.inbox: dict[Buffer, Any] = {}
        self.begun = self.done = self.updates = 0
        self.passes: list[Task] = []
        self._read_at: dict[int, int] = {}
        self._totals: set[Buffer] = set()
        self._from_others = {kind: self._received(kind) for kind in ("forward", "backward")}
        self._before()

    def _received(self, kind: str) -> tuple[str, ...]:
        """Values of a microbatch that a pass takes of other stages."""
        spec, writers = self.flow.spec(kind, self.number), self.flow.dataflow.writers
        return () if spec is None else tuple(n for n in spec.reads if n in writers and writers[n].stage != self.number)

    def has(self, kind: Kind) -> bool:
        """Whether all that the next pass of a kind takes of a microbatch is there."""
        key = self.begun if kind == "forward" else self.done
        if kind == "backward" and key >= self.begun:
            return False
        buffers = [Buffer(n, key) for n in self._from_others[kind]]
        return all(b in self.inbox or b in self.worker.arrays for b in buffers)

    def run(self, kind: Kind) -> list[tuple[int, Buffer, Any]]:
        """Carries the next pass of a kind out, with the update that it completes.

        Returns:
            What is sent: (stage, buffer, array).
        """
        key = self.begun if kind == "forward" else self.done
        self.passes.append(Task(kind, self.number, key))
        for n in self._from_others[kind]:
            if (b := Buffer(n, key)) in self.inbox:
                self.worker.arrays[b] = self.inbox.pop(b)
        if kind == "forward":
            self._read_at[key] = self.updates
        else:
            age = self.updates - self._read_at.pop(key)
            assert age <= self.flow.most_stale, f"{self.passes[-1]} is {age} updates behind its forward pass"
        sent = self._pass(kind, key)
        if kind == "backward":
            if (key + 1) % self.flow.update_every == 0:
                self._update()
            self._free([b for b in self.worker.arrays if b.microbatch == key])
        return sent

    def count(self, kind: Kind) -> None:
        """Notes that a pass is through and that what it sent has arrived."""
        if kind == "forward":
            self.begun += 1
        else:
            self.done += 1

    def finish(self) -> None:
        """Results of a call besides state, once every key is through."""
        spec = self.flow.spec("update", self.number, METRICS)
        if spec is not None:
            self.worker.do(Apply(spec.work, tuple(map(Buffer, spec.reads)), tuple(map(Buffer, spec.writes))))
        self.worker.finish()

    def _pass(self, kind: Kind, key: int) -> list[tuple[int, Buffer, Any]]:
        spec, dataflow = self.flow.spec(kind, self.number), self.flow.dataflow
        if spec is None or not (spec.reads or spec.writes or spec.accumulates):
            return []
        reads = tuple(Buffer(n) if dataflow.by_name[n].lifetime == "step" else Buffer(n, key) for n in spec.reads)
        writes = tuple(Buffer(n, key) for n in (*spec.writes, *spec.accumulates))
        jax.block_until_ready(self.worker.do(Run(spec.work, key, reads, writes)))
        for n in spec.accumulates:
            for total in self._totals_of(n):
                first = total not in self._totals
                self._totals.add(total)
                self.worker.do(Accumulate(total, Buffer(n, key), dataflow.by_name[n].reduce or "sum", first))
        sent = []
        for n in spec.writes:
            for t in sorted({w.stage for w in dataflow.readers.get(n, ())} - {self.number}):
                sent.append((t, Buffer(n, key), self.worker.arrays[Buffer(n, key)]))
        if kind == "forward":
            later = self.flow.spec("backward", self.number)
            kept = set() if later is None else set(later.reads)
            self._free([b for b in self.worker.arrays if b.microbatch == key and b.value not in kept])
        return sent

    def _totals_of(self, name: str) -> list[Buffer]:
        metrics = [Buffer(name)] if name in self._update_reads(METRICS) else []
        return metrics + ([_total(name)] if name in self._update_reads(STATE) else [])

    def _update_reads(self, part: int) -> Sequence[str]:
        spec = self.flow.spec("update", self.number, part)
        return () if spec is None else spec.reads

    def _free(self, buffers: Sequence[Buffer]) -> None:
        self.worker.do(Free(tuple(buffers)))

    # -- the update ----------------------------------------------------------------------------

    def _update(self) -> None:
        shared, state = (self.flow.spec("update", self.number, part) for part in (SHARED, STATE))
        if shared is not None:
            self._apply(shared, [Buffer(n) for n in shared.writes])
        if state is not None:
            self._apply(state, [Buffer(self.flow.replaces[n]) for n in state.writes])
        for n in () if shared is None else shared.writes:
            self.worker.do(Stash(Buffer(n), Buffer(self.flow.replaces[n])))
            self._free([Buffer(n)])
        totals = [b for b in self._totals if b.origin != NONE]
        self._totals.difference_update(totals)
        self._free(totals)
        self.updates += 1
        self._before()

    def _apply(self, spec: WorkSpec, writes: Sequence[Buffer]) -> None:
        sums = self.flow.dataflow.by_name
        reads = tuple(_total(n) if sums[n].lifetime == "accumulator" else Buffer(n) for n in spec.reads)
        jax.block_until_ready(self.worker.do(Apply(spec.work, reads, tuple(writes))))

    def _before(self) -> None:
        """Values computed from the state that passes read."""
        spec = self.flow.spec("before", self.number)
        if spec is not None:
            reads, writes = tuple(map(Buffer, spec.reads)), tuple(map(Buffer, spec.writes))
            self.worker.do(Run(spec.work, NONE, reads, writes))


def _total(name: str) -> Buffer:
    """The accumulator of an update; that of a call's metrics has no origin."""
    return Buffer(name, NONE, 0)
