"""`StageParts`: what one stage takes, computes and gives, by name.

`stage_parts` makes those of all stages of a `StageMap`. `StageValue` says which value of the step an input or output
of a stage's graph is. Which operator is of which stage is decided in `autopar.stages.assign`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal as OneOf
from typing import TypeAlias

from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import closure
from autopar.microbatch import Joined
from autopar.stages.assign import StageMap

#: "step": an input or output of the step, whole; "piece": a microbatch's shard of a batch input; "from": what another
#: stage sends in the loop; "late": what stages send each other after it; "send": what the stage sends in the loop;
#: "met": what is made where examples meet, for the backward passes of all microbatches.
StageValueKind: TypeAlias = OneOf["step", "piece", "from", "late", "send", "met"]


@dataclass(frozen=True, slots=True)
class StageValue:
    """An input or output of a stage's graph; its text names it there, and in plans.

    Args:
        kind: how the stage comes by it, or passes it on.
        name: of the value in the step.
    """

    kind: StageValueKind
    name: str

    @property
    def of_microbatch(self) -> bool:
        """Whether each microbatch has one of its own."""
        return self.kind in ("piece", "from", "send")

    def __str__(self) -> str:
        return self.name if self.kind == "step" else f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Received:
    """A value of one microbatch that another stage sends.

    Args:
        name: the value.
        source: the stage that makes it.
        backward: whether it is made in the backward pass.
    """

    name: str
    source: int
    backward: bool


@dataclass(frozen=True)
class ReceivedLate:
    """A value that a stage sends once: after the loop, or where examples meet, then to itself too.

    Args:
        name: the value.
        source: the stage that makes it.
        part: the first part of the update, or of the meeting, that can read it.
    """

    name: str
    source: int
    part: int


@dataclass(frozen=True)
class StageParts:
    """One stage of a `StageMap`; ids and names are those of the whole graph.

    Args:
        stage: its number.
        inputs: inputs of the graph that it reads whole.
        microbatch_inputs: batch inputs of which it reads a microbatch's piece in the loop.
        received: values that it gets in the loop.
        sent: values that it sends in the loop.
        before: operators that it runs before the loop.
        body: operators that it runs in the loop.
        backward: those of ``body`` that belong to the backward pass.
        joined: values that it joins over microbatches.
        received_late: values that it gets after the loop.
        sent_late: values made after the loop, or joined, that it sends.
        late: operators that it runs after the loop.
        part_of: the part of the update in which each of ``late`` runs.
        outputs: indices of the graph's outputs that it returns.
        received_met: values that it gets where examples meet, those that its own loop takes too.
        sent_met: values made where examples meet, or joined for it, that it sends or its loop takes.
        between: those of ``late`` that it runs where examples meet.
    """

    stage: int
    inputs: tuple[str, ...]
    microbatch_inputs: tuple[str, ...]
    received: tuple[Received, ...]
    sent: tuple[str, ...]
    before: tuple[str, ...]
    body: tuple[str, ...]
    backward: frozenset[str]
    joined: tuple[Joined, ...]
    received_late: tuple[ReceivedLate, ...]
    sent_late: tuple[str, ...]
    late: tuple[str, ...]
    part_of: dict[str, int]
    outputs: tuple[int, ...]
    received_met: tuple[ReceivedLate, ...] = ()
    sent_met: tuple[str, ...] = ()
    between: frozenset[str] = frozenset()

    @property
    def graph_inputs(self) -> tuple[StageValue, ...]:
        """Roles of the inputs of the stage's graph, in order."""
        return (
            *(StageValue("step", n) for n in self.inputs),
            *(StageValue("piece", n) for n in self.microbatch_inputs),
            *(StageValue("from", r.name) for r in self.received),
            *(StageValue("late", r.name) for r in self.received_late),
            *(StageValue("met", r.name) for r in self.received_met),
        )

    @property
    def graph_sends(self) -> tuple[StageValue, ...]:
        """Roles of the outputs of the stage's graph that come after those of the step (``outputs``), in order."""
        return (
            *(StageValue("late", n) for n in self.sent_late),
            *(StageValue("met", n) for n in self.sent_met),
            *(StageValue("send", n) for n in self.sent),
        )


def stage_parts(graph: Graph, map: StageMap) -> tuple[StageParts, ...]:
    """For each stage its operators, and the values that it takes, sends and returns."""
    work = _Split(graph, map)
    return tuple(work.stage(s) for s in range(map.count))


class _Split:
    """Looks up makers and readers for `stage_parts`."""

    def __init__(self, graph: Graph, map: StageMap) -> None:
        self.graph = graph
        self.map = map
        microbatching = map.microbatching
        self.inside, self.late, self.early = (
            set(microbatching.body),
            set(microbatching.after),
            set(microbatching.before),
        )
        self.joined = {j.name: j for j in microbatching.joined}
        self.batch = set(microbatching.batch)
        self.outside = set(microbatching.body_inputs)
        self.between, self.met = set(microbatching.between), set(microbatching.met)
        self.maker: dict[str, Operator] = {}
        self.late_maker: dict[str, Operator] = {}
        for op in graph.operators:
            for v in op.results:
                if op.id in self.inside:
                    self.maker[v.name] = op
                if op.id in self.late and v.name not in self.joined:
                    self.late_maker[v.name] = op
        self.parts = self._part_numbers()
        # By stage, so that many stages take no longer than a few.
        self.bodies: dict[int, list[Operator]] = {s: [] for s in range(map.count)}
        self.updates: dict[int, list[Operator]] = {s: [] for s in range(map.count)}
        for op in graph.operators:
            if op.id in self.inside:
                for s in map.body[op.id]:
                    self.bodies[s].append(op)
            if op.id in self.late:
                for s in map.update[op.id]:
                    self.updates[s].append(op)
        self.before = [op for op in graph.operators if op.id in self.early]
        self.order = {v.name: n for n, v in enumerate(v for op in graph.operators for v in op.results)}
        self.sent = self._all_sent()
        self.sent_met = self._all_sent_met()
        self.all_met = set().union(*self.sent_met.values())
        self.sent_late = self._all_sent_late()
        self.returned: dict[int, list[int]] = {s: [] for s in range(map.count)}
        for i in range(len(graph.outputs)):
            self.returned[self._output_stage(i)].append(i)
        self.joined_at: dict[int, list[Joined]] = {s: [] for s in range(map.count)}
        for j in microbatching.joined:
            self.joined_at[self.joining_stage(j.name)].append(j)
        self.input_order = {i.name: n for n, i in enumerate(graph.inputs)}

    def joining_stage(self, name: str) -> int:
        """The stage that joins a value of the loop."""
        return self.map.body[self.maker[name].id][-1]

    def _part_numbers(self) -> dict[tuple[str, int], int]:
        """(operator, stage) -> part of the update, or of the meeting: one more wherever a value crosses stages."""
        parts: dict[tuple[str, int], int] = {}
        for op in self.graph.operators:
            if op.id not in self.late:
                continue
            for s in self.map.update[op.id]:
                part = 0
                for n in op.reads:
                    maker = self.late_maker.get(n)
                    if maker is not None and maker.id in self.between and op.id not in self.between:
                        continue
                    if maker is not None:
                        there = s in self.map.update[maker.id]
                        t = s if there else self.map.update[maker.id][0]
                        part = max(part, parts[maker.id, t] + (not there))
                    elif n in self.joined and self.joining_stage(n) != s:
                        part = max(part, 1)
                parts[op.id, s] = part
        return parts

    def stage(self, s: int) -> StageParts:
        graph, map = self.graph, self.map
        body, late = self.bodies[s], self.updates[s]
        computed = {v.name for op in body for v in op.results}
        own_late = {v.name for op in late for v in op.results}
        taken = self._in_order(n for op in body for n in op.reads if n not in computed)
        received = tuple(
            Received(n, map.body[self.maker[n].id][0], self.maker[n].id in map.backward)
            for n in taken
            if n in self.maker and n not in self.outside
        )
        from_loop = {r.name for r in received}
        whole = [n for n in taken if n not in from_loop and n not in self.batch and n not in self.met]
        joined = tuple(self.joined_at[s])
        own_joined = {j.name for j in joined}
        outputs = tuple(self.returned[s])
        returned = {o.operand for i in outputs if isinstance((o := graph.outputs[i]).operand, str)}
        late_taken = self._in_order(
            n for n in [*(n for op in late for n in op.reads), *sorted(map_str(returned))] if n not in own_late
        )
        received_late = tuple(
            ReceivedLate(n, *self._late_source(n))
            for n in late_taken
            if n not in own_joined and n not in self.all_met and (n in self.joined or n in self.late_maker)
        )
        taken_met = [n for n in taken if n in self.met]
        taken_met += [n for n in late_taken if n in self.all_met and n not in own_joined]
        received_met = tuple(ReceivedLate(n, *self._late_source(n)) for n in dict.fromkeys(taken_met))
        from_others = {r.name for r in (*received_late, *received_met)}
        early = [n for n in (*whole, *late_taken) if n not in own_joined and n not in from_others]
        before = closure(self.before, early)
        inputs = {n for op in before for n in op.reads} | set(early)
        return StageParts(
            stage=s,
            inputs=tuple(sorted((n for n in inputs if n in self.input_order), key=self.input_order.__getitem__)),
            microbatch_inputs=tuple(n for n in taken if n in self.batch),
            received=received,
            sent=self._ordered(self.sent[s]),
            before=tuple(op.id for op in before),
            body=tuple(op.id for op in body),
            backward=frozenset(op.id for op in body if op.id in map.backward),
            joined=joined,
            received_late=received_late,
            sent_late=self._ordered(n for n in self.sent_late[s] if n in own_late or n in own_joined),
            late=tuple(op.id for op in late),
            part_of={op.id: self.parts[op.id, s] for op in late},
            outputs=outputs,
            received_met=received_met,
            sent_met=self._ordered(self.sent_met[s]),
            between=frozenset(op.id for op in late if op.id in self.between),
        )

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(names))

    def _ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Made values in the order in which they are made."""
        return tuple(sorted(names, key=self.order.__getitem__))

    def _all_sent(self) -> dict[int, set[str]]:
        """Values made first on a stage and read in the loop by stages that do not make them, by stage."""
        wanted: dict[int, set[str]] = {s: set() for s in range(self.map.count)}
        for op in self.graph.operators:
            if op.id not in self.inside:
                continue
            for n in op.reads:
                maker = self.maker.get(n)
                if maker is not None and n not in self.outside:
                    maker_stages = self.map.body[maker.id]
                    if any(t not in maker_stages for t in self.map.body[op.id]):
                        wanted[maker_stages[0]].add(n)
        return wanted

    def _late_source(self, name: str) -> tuple[int, int]:
        """(stage that makes it, first part that can read it)."""
        if name in self.joined:
            return self.joining_stage(name), 1
        maker = self.late_maker[name]
        t = self.map.update[maker.id][0]
        return t, self.parts[maker.id, t] + 1

    def _all_sent_late(self) -> dict[int, set[str]]:
        """Values made after the loop, or joined there, that other stages read after the loop, by stage."""
        return {s: names - self.all_met for s, names in self._read_elsewhere(self.late).items()}

    def _all_sent_met(self) -> dict[int, set[str]]:
        """Values made or joined for a meeting that loops or other stages read, by stage."""
        wanted = self._read_elsewhere(self.between)
        for n in self.met:
            wanted[self._late_source(n)[0]].add(n)
        return wanted

    def _read_elsewhere(self, readers: Container[str]) -> dict[int, set[str]]:
        """Values made outside of the loop, or joined, that operators of these ids read on other stages, by stage."""
        wanted: dict[int, set[str]] = {s: set() for s in range(self.map.count)}
        for op in self.graph.operators:
            if op.id not in readers:
                continue
            for n in op.reads:
                if n in self.joined or n in self.late_maker:
                    source = self._late_source(n)[0]
                    if any(t != source and not self._has(n, t) for t in self.map.update[op.id]):
                        wanted[source].add(n)
        return wanted

    def _has(self, name: str, t: int) -> bool:
        if name in self.joined:
            return self.joining_stage(name) == t
        return t in self.map.update[self.late_maker[name].id]

    def _output_stage(self, index: int) -> int:
        """The stage that returns an output: the one that makes it, or the first that reads the input it is."""
        o = self.graph.outputs[index]
        if isinstance(o.operand, Literal):
            return 0
        if o.operand in self.joined:
            return self.joining_stage(o.operand)
        if o.operand in self.late_maker:
            return self.map.update[self.late_maker[o.operand].id][0]
        if o.operand in self.map.inputs:
            return self.map.inputs[o.operand][0]
        return 0


def map_str(values: Iterable[object]) -> set[str]:
    """The ``values`` that are names."""
    return {v for v in values if isinstance(v, str)}
