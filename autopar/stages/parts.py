"""`StageParts`: what one stage takes, computes and gives, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir import Graph, Literal, Operator
from autopar.microbatch import Joined
from autopar.stages.assign import StageMap


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
    """A value that another stage sends once, after the loop.

    Args:
        name: the value.
        source: the stage that makes it.
        part: the first part of the update that can read it.
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
        pieces: batch inputs of which it reads a microbatch's piece in the loop.
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
    """

    stage: int
    inputs: tuple[str, ...]
    pieces: tuple[str, ...]
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


def _names(op: Operator) -> list[str]:
    return [o for o in op.operands if isinstance(o, str)]


def stage_parts(graph: Graph, map: StageMap) -> tuple[StageParts, ...]:
    """The parts of all stages."""
    work = _Split(graph, map)
    return tuple(work.stage(s) for s in range(map.count))


class _Split:
    """Looks up makers and readers for `stage_parts`."""

    def __init__(self, graph: Graph, map: StageMap) -> None:
        self.graph = graph
        self.map = map
        found = map.found
        self.inside, self.late, self.early = set(found.body), set(found.after), set(found.before)
        self.joined = {j.name: j for j in found.joined}
        self.batch = set(found.batch)
        self.outside = set(found.body_inputs)
        self.maker: dict[str, Operator] = {}
        self.late_maker: dict[str, Operator] = {}
        for op in graph.operators:
            for v in op.results:
                if op.id in self.inside:
                    self.maker[v.name] = op
                if op.id in self.late and v.name not in self.joined:
                    self.late_maker[v.name] = op
        self.parts = self._part_numbers()

    def home(self, name: str) -> int:
        """The stage that joins a value of the loop."""
        return self.map.body[self.maker[name].id][-1]

    def _part_numbers(self) -> dict[tuple[str, int], int]:
        """(operator, stage) -> part of the update: one more wherever a value crosses stages."""
        parts: dict[tuple[str, int], int] = {}
        for op in self.graph.operators:
            if op.id not in self.late:
                continue
            for s in self.map.update[op.id]:
                part = 0
                for n in _names(op):
                    maker = self.late_maker.get(n)
                    if maker is not None:
                        there = s in self.map.update[maker.id]
                        t = s if there else self.map.update[maker.id][0]
                        part = max(part, parts[maker.id, t] + (not there))
                    elif n in self.joined and self.home(n) != s:
                        part = max(part, 1)
                parts[op.id, s] = part
        return parts

    def stage(self, s: int) -> StageParts:
        graph, map = self.graph, self.map
        body = [op for op in graph.operators if op.id in self.inside and s in map.body[op.id]]
        late = [op for op in graph.operators if op.id in self.late and s in map.update[op.id]]
        own = {v.name for op in body for v in op.results}
        own_late = {v.name for op in late for v in op.results}
        taken = self._in_order(n for op in body for n in _names(op) if n not in own)
        received = tuple(
            Received(n, map.body[self.maker[n].id][0], self.maker[n].id in map.backward)
            for n in taken
            if n in self.maker and n not in self.outside
        )
        from_loop = {r.name for r in received}
        whole = [n for n in taken if n not in from_loop and n not in self.batch]
        joined = tuple(j for j in map.found.joined if self.home(j.name) == s)
        own_joined = {j.name for j in joined}
        outputs = tuple(i for i, o in enumerate(graph.outputs) if self._output_stage(i) == s)
        returned = {o.operand for i in outputs if isinstance((o := graph.outputs[i]).operand, str)}
        late_taken = self._in_order(
            n for n in [*(n for op in late for n in _names(op)), *sorted(map_str(returned))] if n not in own_late
        )
        received_late = tuple(
            ReceivedLate(n, *self._late_source(n))
            for n in late_taken
            if n not in own_joined and (n in self.joined or n in self.late_maker)
        )
        from_others = {r.name for r in received_late}
        early = [n for n in (*whole, *late_taken) if n not in own_joined and n not in from_others]
        before = self._closure(early)
        inputs = {n for op in before for n in _names(op)} | set(early)
        return StageParts(
            stage=s,
            inputs=tuple(i.name for i in graph.inputs if i.name in inputs),
            pieces=tuple(n for n in taken if n in self.batch),
            received=received,
            sent=self._sent(s, own),
            before=tuple(op.id for op in before),
            body=tuple(op.id for op in body),
            backward=frozenset(op.id for op in body if op.id in map.backward),
            joined=joined,
            received_late=received_late,
            sent_late=self._sent_late(s, own_late | own_joined),
            late=tuple(op.id for op in late),
            part_of={op.id: self.parts[op.id, s] for op in late},
            outputs=outputs,
        )

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(names))

    def _closure(self, wanted: Iterable[str]) -> list[Operator]:
        needed = set(wanted)
        found = []
        for op in reversed(self.graph.operators):
            if op.id in self.early and any(v.name in needed for v in op.results):
                found.append(op)
                needed.update(_names(op))
        return found[::-1]

    def _sent(self, s: int, own: set[str]) -> tuple[str, ...]:
        """Values made here first and read in the loop by stages that do not make them."""
        wanted: set[str] = set()
        for op in self.graph.operators:
            if op.id in self.inside:
                for t in self.map.body[op.id]:
                    wanted.update(
                        n
                        for n in _names(op)
                        if n in own
                        and n not in self.outside
                        and t not in (made := self.map.body[self.maker[n].id])
                        and made[0] == s
                    )
        return tuple(v.name for op in self.graph.operators for v in op.results if v.name in wanted)

    def _late_source(self, name: str) -> tuple[int, int]:
        """(stage that makes it, first part that can read it)."""
        if name in self.joined:
            return self.home(name), 1
        maker = self.late_maker[name]
        t = self.map.update[maker.id][0]
        return t, self.parts[maker.id, t] + 1

    def _sent_late(self, s: int, own: set[str]) -> tuple[str, ...]:
        wanted: set[str] = set()
        for op in self.graph.operators:
            if op.id in self.late:
                for t in self.map.update[op.id]:
                    for n in _names(op):
                        if n in own and self._late_home(n, s) and t != s and not self._has(n, t):
                            wanted.add(n)
        return tuple(v.name for op in self.graph.operators for v in op.results if v.name in wanted)

    def _late_home(self, name: str, s: int) -> bool:
        return self._late_source(name)[0] == s

    def _has(self, name: str, t: int) -> bool:
        if name in self.joined:
            return self.home(name) == t
        return t in self.map.update[self.late_maker[name].id]

    def _output_stage(self, index: int) -> int:
        """The stage that returns an output: the one that makes it, or the first that reads the input it is."""
        o = self.graph.outputs[index]
        if isinstance(o.operand, Literal):
            return 0
        if o.operand in self.joined:
            return self.home(o.operand)
        if o.operand in self.late_maker:
            return self.map.update[self.late_maker[o.operand].id][0]
        if o.operand in self.map.inputs:
            return self.map.inputs[o.operand][0]
        return 0


def map_str(values: Iterable[object]) -> set[str]:
    """Those of ``values`` that are names."""
    return {v for v in values if isinstance(v, str)}
