"""One stage of AMPNet: what it has, its passes and updates, and a call of it on a worker.

`run_stage` carries out the call of one stage, over whatever link joins it to the others. Each stage counts its own keys
under way, which bounds how old its gradients are (see `autopar.schedule.ampnet`). Where backward passes go through all
stages, the keys of stage 0 are those of all. What a stage computes depends on the order of its own passes alone, since
keys do not overtake each other: the same orders give the same numbers to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax

from autopar.errors import ScheduleError
from autopar.runtime.interpreter import Worker
from autopar.runtime.transport.base import ArrivalLink
from autopar.schedule import NONE, Accumulate, Apply, Buffer, Free, Kind, Run, Stash, Task, WorkSpec
from autopar.schedule.ampnet import AmpFlow
from autopar.schedule.stale import METRICS, SHARED, STATE

#: Letters of passes in the text of an order.
LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B"}
#: Passes by their letters.
KINDS: Mapping[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


def run_stage(stage: AmpStage, link: ArrivalLink, before: Callable[[int], None], order: str = "") -> str:
    """Runs a call of one stage.

    Args:
        stage: with its inputs.
        link: to the other stages.
        before: called with the number of passes so far before each.
        order: letters of passes in the order that they are to have; empty takes what arrives, backward passes first.

    Returns:
        The order that they had.

    Raises:
        ScheduleError: the order is of other numbers, or waits for what does not come.
        PeerLostError, SilentPeerError: see `WorkerLink.receive`.
    """
    keys = stage.flow.microbatches
    numbers = {letter: order.count(letter) for letter in KINDS}
    if order and (len(order) != 2 * keys or set(numbers.values()) != {keys}):
        raise ScheduleError(f"the order has passes {numbers}; stage {stage.number} has {keys} of each")
    coming = stage.coming()
    while stage.done < keys:
        for source in coming:
            while coming[source] and link.ready(source):
                _take(stage, link, source, coming)
        kind = _next(stage, order)
        if kind is None:
            awaited = [s for s, count in coming.items() if count]
            if not awaited:
                raise ScheduleError(f"stage {stage.number} waits for ever before pass {len(stage.passes)} of {order}")
            _take(stage, link, link.wait_any(awaited), coming)
            continue
        before(len(stage.passes))
        for to, buffer, array in stage.run(kind):
            link.send(to, stage.tag(buffer), array, buffer.value)
        stage.count(kind)
    stage.finish()
    return "".join(LETTERS[task.kind] for task in stage.passes)


def _take(stage: AmpStage, link: ArrivalLink, source: int, coming: Counter[int]) -> None:
    tag = link.next_tag(source)
    buffer = stage.tagged(tag)
    stage.worker.arrays[buffer] = link.receive(source, tag, stage.worker.placements.get(buffer.value))
    coming[source] -= 1


def _next(stage: AmpStage, order: str) -> Kind | None:
    if not order:
        return choice(stage)
    kind = KINDS[order[len(stage.passes)]]
    return kind if stage.has(kind) else None


def choice(stage: AmpStage) -> Kind | None:
    """The pass that a stage takes next; None where it has to wait."""
    if stage.has("backward"):
        return "backward"
    return "forward" if stage.may_begin and stage.has("forward") else None


class AmpStage:
    """A stage during a call.

    Args:
        number: of the stage.
        flow: what is carried out.
        worker: carries instructions out; its inputs lie there.
    """

    def __init__(self, number: int, flow: AmpFlow, worker: Worker) -> None:
        self.number, self.flow, self.worker = number, flow, worker
        self.begun = self.done = self.updates = 0
        self.passes: list[Task] = []
        self._read_at: dict[int, int] = {}
        self._totals: set[Buffer] = set()
        self._from_others = {kind: flow.received(kind, number) for kind in LETTERS}
        self._before()

    # -- what comes ----------------------------------------------------------------------------

    @cached_property
    def _names(self) -> Mapping[str, int]:
        return {v.name: n for n, v in enumerate(self.flow.dataflow.values)}

    def tag(self, buffer: Buffer) -> int:
        """The number by which a receiver knows a buffer."""
        return self._names[buffer.value] * self.flow.microbatches + buffer.microbatch

    def tagged(self, tag: int) -> Buffer:
        """The buffer of a tag."""
        value, key = divmod(tag, self.flow.microbatches)
        return Buffer(self.flow.dataflow.values[value].name, key)

    def coming(self) -> Counter[int]:
        """Number of arrays of a call that each other stage sends to this one."""
        flow, coming = self.flow, Counter[int]()
        for source in range(flow.stages):
            for kind in LETTERS if source != self.number else ():
                spec = flow.spec(kind, source)
                for n in () if spec is None else spec.writes:
                    if any(w.stage == self.number for w in flow.dataflow.readers.get(n, ())):
                        coming[source] += flow.microbatches
        return coming

    @property
    def may_begin(self) -> bool:
        """Whether the next key is within the number that may be under way."""
        return self.begun < min(self.flow.microbatches, self.done + self.flow.most_active)

    def has(self, kind: Kind) -> bool:
        """Whether all that the next pass of a kind takes of a microbatch is there."""
        key = self.begun if kind == "forward" else self.done
        if kind == "backward" and key >= self.begun:
            return False
        return all(Buffer(n, key) in self.worker.arrays for n in self._from_others[kind])

    # -- passes --------------------------------------------------------------------------------

    def run(self, kind: Kind) -> list[tuple[int, Buffer, Any]]:
        """Carries the next pass of a kind out, with the update that it completes.

        Returns:
            What is sent: (stage, buffer, array).
        """
        key = self.begun if kind == "forward" else self.done
        self.passes.append(Task(kind, self.number, key))
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
