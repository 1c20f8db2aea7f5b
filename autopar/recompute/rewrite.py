"""`recomputed`: a graph whose backward pass runs parts of the forward pass again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from autopar.ir import Graph, Operand, Operator, TensorType, Value
from autopar.ir.phases import BACKWARD, RECOMPUTED, marks_of
from autopar.ir.primitives import is_generator
from autopar.recompute.select import Level, Phases, RecomputedGroup, select

#: Part of the scopes of operators that run again, as jax calls those of `jax.checkpoint`.
SCOPE = "rematted_computation"
#: Marks of what runs again.
AGAIN: Final = (BACKWARD, RECOMPUTED)


@dataclass(frozen=True)
class Recomputed:
    """A rewritten graph.

    Args:
        graph: the graph; operators that run again lie before the first that needs them.
        copies: by id of an operator that runs again the id of the first.
        barriers: by id of a barrier that keeps the two apart the id of the first operator after it.
    """

    graph: Graph
    copies: Mapping[str, str]
    barriers: Mapping[str, str]


def recomputed(graph: Graph, phases: Phases, layers: Sequence[Sequence[str]], level: Level) -> Recomputed:
    """``graph`` with a backward pass that recomputes what ``level`` does not hold.

    What runs again is the same operator on the same operands, so random bits come out the same. Its operands pass an
    ``optimization_barrier``, with a value of the backward pass where one is at hand: compilers must not merge the two
    runs, nor do the second early.

    Args:
        graph: operators of the forward and the backward pass, and perhaps of more.
        phases: ids of the operators of each pass.
        layers: by layer the ids of its operators in the forward pass.
        level: how much is kept.
    """
    selected = select(graph, phases, layers, level)
    return _Rewriting(graph, phases, selected.groups).result() if selected.groups else Recomputed(graph, {}, {})


class _Rewriting:
    """See `recomputed`."""

    def __init__(self, graph: Graph, phases: Phases, groups: Sequence[RecomputedGroup]) -> None:
        self.graph, self.backward, self.groups = graph, phases.backward, groups
        self.counts: Counter[str] = Counter()
        self.taken_ids = {op.id for op in graph.operators}
        self.copies: dict[str, str] = {}
        self.barriers: dict[str, str] = {}
        self.names: dict[str, str] = {}

    def result(self) -> Recomputed:
        group_of = {name: n for n, group in enumerate(self.groups) for name in group.values}
        operators: list[Operator] = []
        done: set[int] = set()
        for op in self.graph.operators:
            if op.id not in self.backward:
                operators.append(op)
                continue
            changed = op
            for name in op.reads:
                number = group_of.get(name)
                if number is not None and number not in done:
                    done.add(number)
                    copied, changed = self._group(self.groups[number], changed)
                    operators += copied
            operators.append(replace(changed, operands=_renamed(changed.operands, self.names)))
        return Recomputed(replace(self.graph, operators=tuple(operators)), self.copies, self.barriers)

    def _group(self, group: RecomputedGroup, reader: Operator) -> tuple[list[Operator], Operator]:
        """The operators of a group, and their first reader, which takes its cotangent after their barrier."""
        makers = self.graph.producers
        cotangent = next(
            (
                o
                for o in reader.operands
                if isinstance(o, str) and o in makers and makers[o].id in self.backward and not is_generator(makers[o])
            ),
            None,
        )
        first = self.graph.by_id[group.operators[0]]
        taken = [*group.taken, *([] if cotangent is None else [cotangent])]
        if not taken:
            return self._copied(group, {}), reader
        scope = _inside(first.scope)
        id = self._fresh(scope, "optimization_barrier")
        results = _results(id, [self.graph.types[n] for n in taken])
        barrier = Operator(
            id, "optimization_barrier", tuple(taken), results, scope=scope, source=first.source, marks=AGAIN
        )
        self.barriers[id] = first.id
        passed = dict(zip(taken, (v.name for v in results), strict=True))
        if cotangent is not None:
            reader = replace(reader, operands=tuple(passed[o] if o == cotangent else o for o in reader.operands))
        return [barrier, *self._copied(group, {n: passed[n] for n in group.taken})], reader

    def _copied(self, group: RecomputedGroup, passed: Mapping[str, str]) -> list[Operator]:
        inside = dict(passed)
        copies = []
        for original in (self.graph.by_id[id] for id in group.operators):
            scope = _inside(original.scope)
            id = self._fresh(scope, original.primitive)
            self.copies[id] = original.id
            results = _results(id, [v.type for v in original.results])
            operands = _renamed(original.operands, inside)
            marks = marks_of(original.marks, AGAIN)
            copies.append(replace(original, id=id, scope=scope, operands=operands, results=results, marks=marks))
            inside.update((a.name, b.name) for a, b in zip(original.results, results, strict=True))
        self.names.update((name, inside[name]) for name in group.values)
        return copies

    def _fresh(self, scope: str, primitive: str) -> str:
        stem = f"{scope}/{primitive}"
        while True:
            id = f"{stem}.{self.counts[stem]}"
            self.counts[stem] += 1
            if id not in self.taken_ids:
                return id


def _renamed(operands: Sequence[Operand], names: Mapping[str, str]) -> tuple[Operand, ...]:
    return tuple(names.get(o, o) if isinstance(o, str) else o for o in operands)


def _inside(scope: str) -> str:
    return f"{scope}/{SCOPE}" if scope else SCOPE


def _results(id: str, types: Sequence[TensorType]) -> tuple[Value, ...]:
    names = [id] if len(types) == 1 else [f"{id}:{n}" for n in range(len(types))]
    return tuple(Value(n, t) for n, t in zip(names, types, strict=True))
