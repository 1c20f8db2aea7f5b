"""Instruction lists of pipelines without a flush: one for each call, periodic once the pipeline is full, and the drain.

`windows` makes the lists of all calls from a `StaleFlow`, which says what the pipeline carries out and how buffers are
named between its calls. Which version of the weights a pass reads is `autopar.schedule.without_flush.schedules`.

Microbatches are counted over all calls: call c brings k = c m .. c m + m - 1. In slot i of a call stage s runs the
forward pass of k = c m + i and the backward pass of k - (p - 1 - s), so that in the steady state nobody waits (1F1B of
Narayanan et al., SOSP'19, figure 4, cut where a call begins on each stage). What is under way when a call ends is
carried to the next: activations, versions, gradients that were sent.

Names of buffers are relative to their call: microbatch k is ``k - c m + p - 1``; a version that passes read is
`StaleFlow.index`; an accumulator over a call of "2bw" has its call relative to this one and origin 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from autopar.schedule.dataflow import Dataflow, ValueSpec, Work, WorkSpec
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Free,
    Instruction,
    Recv,
    Run,
    Send,
    Stash,
    WorkerProgram,
    made_by,
)
from autopar.schedule.table import Kind
from autopar.schedule.without_flush.schedules import VersionMap

#: Parts of the update of a stage: new state; metrics of a call; state that other stages return and this one reads.
STATE, METRICS, SHARED = 0, 1, 2


@dataclass(frozen=True)
class StaleFlow:
    """Dataflow of an asynchronous pipeline with versions of weights; stage s is on worker s.

    Args:
        dataflow: its works; the update has the parts `STATE`, `METRICS` and `SHARED`.
        versions: which version each pass reads.
        microbatches: m, brought by each call.
        replaces: by value that the update writes the input that it is the next of.
    """

    dataflow: Dataflow
    versions: VersionMap
    microbatches: int
    replaces: Mapping[str, str]

    @property
    def stages(self) -> int:
        """Number of stages, p."""
        return self.versions.stages

    @property
    def lag(self) -> int:
        """Slots by which the first stage's backward pass is after its forward pass."""
        return self.stages - 1

    @property
    def steady(self) -> int:
        """Number of the first call whose lists all later calls repeat."""
        return math.ceil(self.lag / self.microbatches)

    def spec(self, kind: str, stage: int, part: int = 0) -> WorkSpec | None:
        """A work that reads or writes something; None where there is none."""
        return self.dataflow.by_work.get(Work(kind, stage, part))  # type: ignore[arg-type]

    def number(self, microbatch: int, call: int) -> int:
        """Number by which the lists of a call name a microbatch: 0 is the earliest that may still be under way."""
        return microbatch - call * self.microbatches + self.lag

    def unclamped(self, stage: int, microbatch: int) -> int:
        """The version that a microbatch would read had there been updates before the first."""
        if self.versions.name == "2bw":
            return microbatch // self.microbatches - 1
        return microbatch - (self.stages - 1 - (stage if self.versions.name == "pipedream" else 0))

    @property
    def step(self) -> int:
        """Updates of a stage a call."""
        return self.microbatches // self.versions.update_every

    def index(self, version: int, call: int) -> int:
        """Number by which the lists of a call name a version of the weights."""
        return version - call * self.step + 2 * self.lag + 1

    @cached_property
    def state(self) -> frozenset[str]:
        """Inputs that the update replaces."""
        return frozenset(self.replaces.values())

    @cached_property
    def versioned(self) -> Mapping[int, tuple[str, ...]]:
        """Values that have versions, by stage: state that passes read, and values computed from it before them."""
        versioned: dict[int, tuple[str, ...]] = {}
        for s in range(self.stages):
            names: dict[str, None] = {}
            before = self.spec("before", s)
            if before is not None and self.state.isdisjoint(before.reads):
                before = None  # what it makes is the same for all versions
            for kind in ("forward", "backward"):
                spec = self.spec(kind, s)
                for n in () if spec is None else spec.reads:
                    if n in self.state or (before is not None and n in before.writes):
                        names[n] = None
            versioned[s] = tuple(names)
        return MappingProxyType(versioned)

    def is_carried(self, buffer: Buffer) -> bool:
        """Whether a buffer that is left when a call ends is handed to the next one; the caller has the others."""
        value = self.dataflow.by_name[buffer.value]
        if not value.is_input or buffer.microbatch != NONE:
            return True
        return any(n == buffer.value for w, n in self.replaces.items() if _is_shared(self.dataflow, w))

    def shifted(self, buffer: Buffer) -> Buffer:
        """The name in a call of what is called ``buffer`` in the call before."""
        if buffer.microbatch == NONE:
            return buffer
        by = self.microbatches
        if buffer.origin != NONE:
            by = 1
        elif self.dataflow.by_name[buffer.value].lifetime == "step":
            by = self.step
        return Buffer(buffer.value, buffer.microbatch - by, buffer.origin)


def _is_shared(dataflow: Dataflow, name: str) -> bool:
    return dataflow.writers[name].part == SHARED


@dataclass(frozen=True)
class Window:
    """Instructions of all workers in one call of an asynchronous pipeline, or in the drain that ends it.

    Args:
        workers: their lists.
        starts: by worker what earlier calls left, in this call's names.
        batch: by worker the pieces of microbatches that the call brings.
        ends: by worker what is left for the next call, in the next call's names.
    """

    workers: tuple[WorkerProgram, ...]
    starts: tuple[frozenset[Buffer], ...]
    batch: tuple[frozenset[Buffer], ...]
    ends: tuple[frozenset[Buffer], ...]

    def left(self, flow: StaleFlow) -> list[tuple[int, Buffer]]:
        """(worker, buffer) of what is left for the next call, in this call's names."""
        lasting = [v for v in flow.dataflow.values if v.is_input and v.lifetime == "step"]
        held = []
        for w, program in enumerate(self.workers):
            buffers = {Buffer(v.name) for v in lasting if w in v.stages} | self.starts[w] | self.batch[w]
            buffers |= {b for i in program.instructions for b in made_by(i)}
            held += [(w, b) for b in sorted(buffers) if flow.is_carried(b) and flow.shifted(b) in self.ends[w]]
        return held


@dataclass(frozen=True)
class Windows:
    """Instruction lists of all calls of an asynchronous pipeline.

    Args:
        flow: what they carry out.
        calls: of call 0, 1, ..; the last is that of all later calls.
        drains: what ends everything after 1, 2, .. calls; the last likewise.
    """

    flow: StaleFlow
    calls: tuple[Window, ...]
    drains: tuple[Window, ...]

    def call(self, number: int) -> Window:
        """The lists of a call, from 0."""
        return self.calls[min(number, len(self.calls) - 1)]

    def drain(self, calls: int) -> Window:
        """The lists that end what ``calls`` calls, at least one, began."""
        return self.drains[min(calls, len(self.drains)) - 1]


def windows(flow: StaleFlow) -> Windows:
    """The lists of all calls and drains."""
    inputs = [v for v in flow.dataflow.values if v.is_input and v.lifetime == "step"]
    carried = [v for v in inputs if flow.is_carried(Buffer(v.name))]
    first = tuple(frozenset(Buffer(v.name) for v in carried if s in v.stages) for s in range(flow.stages))
    calls: list[Window] = []
    drains: list[Window] = []
    for call in range(flow.steady + 1):
        calls.append(_CallLists(flow, call, calls[-1].ends if calls else first).call_window())
        drains.append(_CallLists(flow, call + 1, calls[-1].ends).drain_window())
    return Windows(flow, tuple(calls), tuple(drains))


class _CallLists:
    """The lists of one call so far, and what lies where."""

    def __init__(self, flow: StaleFlow, call: int, starts: tuple[frozenset[Buffer], ...]) -> None:
        self.flow, self.call, self.starts = flow, call, starts
        self.stages, self.m = flow.stages, flow.microbatches
        self.lists: list[list[Instruction]] = [[] for _ in range(self.stages)]
        self.there: list[set[Buffer]] = [set(s) for s in starts]
        self.tags = 0
        for value in flow.dataflow.values:
            if value.is_input and value.lifetime == "step":
                for s in value.stages:
                    self.there[s].add(Buffer(value.name))

    def call_window(self) -> Window:
        """The instructions of every worker for one call: a batch of microbatches."""
        batch = tuple(frozenset(self._batch_buffers(s)) for s in range(self.stages))
        for s in range(self.stages):
            self.there[s] |= batch[s]
            if self.call == 0:
                self._born(s, sorted({self.flow.unclamped(s, k) for k in self._first_readers(s)}))
        first = self.call * self.m
        passes: list[tuple[Kind, int, int, int]]
        passes = [("forward", slot, s, first + slot) for slot in range(self.m) for s in range(self.stages)]
        passes += [("backward", slot, s, first + slot - self._backward_lag(s)) for _, slot, s, _ in passes]
        self._carry_out(passes)
        for s in range(self.stages):
            self._metrics(s)
        return self._window(batch)

    def _backward_lag(self, s: int) -> int:
        return self.stages - 1 - s

    def drain_window(self) -> Window:
        """The backward passes that are left, with their updates."""
        first = self.call * self.m
        slots = [(slot, s) for slot in range(self.flow.lag) for s in range(self.stages) if slot < self._backward_lag(s)]
        self._carry_out([("backward", slot, s, first + slot - self._backward_lag(s)) for slot, s in slots])
        return self._window((frozenset[Buffer](),) * self.stages)

    def _window(self, batch: tuple[frozenset[Buffer], ...]) -> Window:
        flow = self.flow
        ends = tuple(frozenset(flow.shifted(b) for b in buffers if flow.is_carried(b)) for buffers in self.there)
        programs = tuple(WorkerProgram(s, tuple(lines)) for s, lines in enumerate(self.lists))
        return Window(programs, self.starts, batch, ends)

    def _batch_buffers(self, s: int) -> Iterable[Buffer]:
        for value in self.flow.dataflow.values:
            if value.is_input and value.lifetime == "microbatch" and s in value.stages:
                for k in range(self.call * self.m, (self.call + 1) * self.m):
                    yield Buffer(value.name, self.flow.number(k, self.call))

    def _first_readers(self, s: int) -> range:
        """Microbatches that read the first version."""
        count = 0
        while self.flow.unclamped(s, count) <= 0:
            count += 1
        return range(count)

    def _carry_out(self, passes: Iterable[tuple[Kind, int, int, int]]) -> None:
        """Passes of (kind, slot, stage, microbatch) in the order in which they run where all stages take as long.

        What a pass sends is received where it ends, as in `autopar.schedule.build`: lists made so never wait for each
        other in a circle.
        """
        moments = []
        for kind, slot, s, k in passes:
            start = 3 * slot + s + (kind == "backward")
            moments += [(start, 1, s, kind, k), (start + (1 if kind == "forward" else 2), 0, s, kind, k)]
        for _, begins, s, kind, k in sorted(m for m in moments if m[-1] >= 0):
            if begins:
                self._begin(kind, s, k)
            else:
                self._end(kind, s, k)

    # -- one microbatch ------------------------------------------------------------------------

    def _buffer(self, name: str, s: int, k: int) -> Buffer:
        """The buffer that a pass of a microbatch reads."""
        flow = self.flow
        if flow.dataflow.by_name[name].lifetime != "step":
            return Buffer(name, flow.number(k, self.call))
        if name in flow.versioned[s]:
            return Buffer(name, flow.index(flow.unclamped(s, k), self.call))
        return Buffer(name)

    def _begin(self, kind: Kind, s: int, k: int) -> None:
        spec = self._pass(kind, s)
        if spec is None:
            return
        number = self.flow.number(k, self.call)
        reads = tuple(self._buffer(n, s, k) for n in spec.reads)
        writes = tuple(Buffer(n, number) for n in (*spec.writes, *spec.accumulates))
        self.lists[s].append(Run(spec.work, k % self.m, reads, writes))
        self.there[s].update(writes)

    def _pass(self, kind: Kind, s: int) -> WorkSpec | None:
        """The work of a pass; None where it does nothing."""
        spec = self.flow.spec(kind, s)
        return spec if spec is not None and (spec.reads or spec.writes or spec.accumulates) else None

    def _end(self, kind: Kind, s: int, k: int) -> None:
        spec = self._pass(kind, s)
        if spec is not None:
            self._pass_on(spec, s, k)
        if kind == "backward":
            self._after_backward(s, k)

    def _pass_on(self, spec: WorkSpec, s: int, k: int) -> None:
        number = self.flow.number(k, self.call)
        for n in spec.writes:
            for t in sorted({w.stage for w in self.flow.dataflow.readers.get(n, ())} - {s}):
                self.lists[s].append(Send(Buffer(n, number), t, self.tags))
                self.lists[t].append(Recv(Buffer(n, number), s, self.tags))
                self.there[t].add(Buffer(n, number))
                self.tags += 1
        for n in spec.accumulates:
            self._accumulate(s, k, self.flow.dataflow.by_name[n], Buffer(n, number))
        if spec.work.kind == "forward":
            later = self.flow.spec("backward", s)
            kept = {*(later.reads if later is not None else ()), *self._update_reads(s, STATE)}
            self._free(s, [b for b in self._of_microbatch(s, number) if b.value not in kept])

    def _after_backward(self, s: int, k: int) -> None:
        """Frees what a microbatch leaves and, where it is due, updates."""
        version = self.flow.unclamped(s, k)
        last = self.flow.versions.update_every == 1 or (k + 1) % self.m == 0
        names = self.flow.versioned[s]
        self._free(s, [Buffer(n, self.flow.index(version, self.call)) for n in names if last])
        if last:
            self._update(s, k)
        self._free(s, self._of_microbatch(s, self.flow.number(k, self.call)))

    def _of_microbatch(self, s: int, number: int) -> list[Buffer]:
        by_name = self.flow.dataflow.by_name
        return [
            b
            for b in self.there[s]
            if b.microbatch == number and b.origin == NONE and by_name[b.value].lifetime != "step"
        ]

    def _accumulate(self, s: int, k: int, value: ValueSpec, term: Buffer) -> None:
        totals = [Buffer(value.name)] if value.name in self._update_reads(s, METRICS) else []
        if value.name in self._update_reads(s, STATE) and self.flow.versions.update_every > 1:
            totals.append(self._total(value.name, k))
        for total in totals:
            first = total not in self.there[s]
            self.there[s].add(total)
            self.lists[s].append(Accumulate(total, term, value.reduce or "sum", first))

    def _total(self, name: str, k: int) -> Buffer:
        """The accumulator of the call that a microbatch belongs to."""
        return Buffer(name, k // self.m - self.call + 1, 0)

    def _update_reads(self, s: int, part: int) -> Sequence[str]:
        spec = self.flow.spec("update", s, part)
        return () if spec is None else spec.reads

    def _free(self, s: int, buffers: Sequence[Buffer]) -> None:
        gone = tuple(sorted(b for b in buffers if b in self.there[s]))
        if gone:
            self.there[s].difference_update(gone)
            self.lists[s].append(Free(gone))

    # -- the update ----------------------------------------------------------------------------

    def _update(self, s: int, k: int) -> None:
        shared, state_spec = self.flow.spec("update", s, SHARED), self.flow.spec("update", s, STATE)
        if shared is not None:
            self._apply(s, shared, k, [Buffer(n) for n in shared.writes])
        if state_spec is not None:
            self._apply(s, state_spec, k, [Buffer(self.flow.replaces[n]) for n in state_spec.writes])
            self._free(s, [self._total(n, k) for n in state_spec.reads])
        for n in () if shared is None else shared.writes:
            self.lists[s].append(Stash(Buffer(n), Buffer(self.flow.replaces[n])))
            self._free(s, [Buffer(n)])
        self._born(s, [k // self.flow.versions.update_every + 1])

    def _apply(self, s: int, spec: WorkSpec, k: int, writes: Sequence[Buffer]) -> None:
        reads = []
        for n in spec.reads:
            if self.flow.dataflow.by_name[n].lifetime != "accumulator":
                reads.append(Buffer(n))
            elif self.flow.versions.update_every > 1:
                reads.append(self._total(n, k))
            else:
                reads.append(Buffer(n, self.flow.number(k, self.call)))
        self.lists[s].append(Apply(spec.work, tuple(reads), tuple(writes)))
        self.there[s].update(writes)

    def _born(self, s: int, versions: Sequence[int]) -> None:
        """Keeps the newest state as the version of these numbers, which are one version before the first update."""
        before, names = self.flow.spec("before", s), self.flow.versioned[s]
        first, *others = [self.flow.index(v, self.call) for v in versions]
        if before is not None:
            writes = tuple(Buffer(n, first if n in names else NONE) for n in before.writes)
            self.lists[s].append(Run(before.work, NONE, tuple(map(Buffer, before.reads)), writes))
            self.there[s].update(writes)
        for n in names:
            computed = before is not None and n in before.writes
            source = Buffer(n, first) if computed else Buffer(n)
            for at in others if computed else (first, *others):
                self.lists[s].append(Stash(source, Buffer(n, at)))
                self.there[s].add(Buffer(n, at))

    def _metrics(self, s: int) -> None:
        spec = self.flow.spec("update", s, METRICS)
        if spec is None:
            return
        writes = [Buffer(n) for n in spec.writes]
        self.lists[s].append(Apply(spec.work, tuple(map(Buffer, spec.reads)), tuple(writes)))
        sums = [n for n in spec.reads if self.flow.dataflow.by_name[n].lifetime == "accumulator"]
        self._free(s, [Buffer(n) for n in sums])
