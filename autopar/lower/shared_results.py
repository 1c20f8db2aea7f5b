"""Results of a cond in which some branches save examples and others do not, at any depth of loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.ir import Graph, Literal, Operator
from autopar.ir.loops import Scan

#: A value by the graph that makes it and the depths of the loops that took slices of it.
Identity: TypeAlias = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Level:
    """A graph among the bodies of the loops around it.

    Args:
        graph: the graph.
        path: ids of the enclosing loops, each followed by ``/``.
        scan: the loop whose body it is; None for the step itself.
        parent: where that loop is.
    """

    graph: Graph
    path: str = ""
    scan: Operator | None = None
    parent: Level | None = None

    @property
    def depth(self) -> int:
        """Number of loops around it."""
        return 0 if self.parent is None else self.parent.depth + 1

    def body(self, op: Operator) -> Level:
        """The body of ``op``, a scan of this graph."""
        return Level(op.region("body"), f"{self.path}{op.id}/", op, self)

    def stacked(self, name: str) -> list[str] | None:
        """Results of the loop that stack the value ``name`` of its body; None where it is carried on or returned."""
        at = [n for n, o in enumerate(self.graph.outputs) if o.operand == name]
        if not at:
            return []
        if self.scan is None or min(at) < Scan.of(self.scan).num_carry:
            return None
        return [self.scan.results[n].name for n in at]


@dataclass(frozen=True)
class Shared:
    """A result of a cond in which some branches save examples, and others do not.

    Args:
        path: as in `Level`.
        cond: the operator.
        result: number of the result.
        others: numbers of the branches that save something else.
    """

    path: str
    cond: Operator
    result: int
    others: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the result."""
        return self.cond.results[self.result].name

    def operand(self, branch: int) -> str | Literal | None:
        """What lies outside that a branch passes on; None where it computes what it saves."""
        region = self.cond.regions[branch][1]
        names = [i.name for i in region.inputs]
        passed = region.outputs[self.result].operand
        return self.cond.operands[1 + names.index(passed)] if passed in names else None


def shared_results(graph: Graph) -> list[Shared]:
    """The results that branches share, of which every reader is a cond with the same predicate.

    Args:
        graph: a step with roles.
    """
    return list(_shared(Level(graph), {i.name for i in graph.inputs if i.role == "batch"}))


def _shared(level: Level, given: set[str]) -> Iterator[Shared]:
    of_batch = _reached(level.graph, given)
    for op in level.graph.operators:
        if op.primitive == "scan":
            yield from _shared(level.body(op), _given(op, of_batch))
        elif op.primitive == "cond" and not op.effects:
            saving = [_saves_examples(op, region, of_batch) for _, region in op.regions]
            for n, value in enumerate(op.results):
                others = tuple(b for b, kept in enumerate(saving) if kept[n] is False)
                if others and any(kept[n] for kept in saving) and _is_read_by_branches(level, op, value.name):
                    yield Shared(level.path, op, n, others)


def _given(op: Operator, of_batch: set[str]) -> set[str]:
    """Inputs of a loop's body that depend on examples, in some iteration."""
    scan = Scan.of(op)
    names = [i.name for i in scan.body.inputs]
    given = {name for name, o in zip(names, op.operands, strict=True) if o in of_batch}
    while True:
        reached = _reached(scan.body, given)
        carries = names[scan.num_consts : scan.num_whole]
        more = {c for c, o in zip(carries, scan.body.outputs, strict=False) if o.operand in reached} - given
        if not more:
            return given
        given |= more


def _saves_examples(op: Operator, region: Graph, of_batch: set[str]) -> list[bool | None]:
    """Whether each output of a branch depends on examples; None for what can be made in any layout."""
    examples = _reached(region, {i.name for i, o in zip(region.inputs, op.operands[1:], strict=True) if o in of_batch})
    values = _reached(region, {i.name for i in region.inputs})
    return [o.operand in examples if o.operand in values else None for o in region.outputs]


def _reached(graph: Graph, given: set[str]) -> set[str]:
    """``given`` and what depends on it; a barrier passes each of its operands on by itself."""
    reached = set(given)
    for op in graph.operators:
        if op.primitive == "optimization_barrier":
            reached.update(v.name for v, o in zip(op.results, op.operands, strict=True) if o in reached)
        elif not reached.isdisjoint(op.reads):
            reached.update(v.name for v in op.results)
    return reached


def _is_read_by_branches(level: Level, op: Operator, name: str) -> bool:
    """Whether ``name``, a result of ``op``, is read by conds alone that take the branch that ``op`` takes."""
    readers = _readers(level, name)
    mine = _identities(level, op.operands[0])
    return bool(readers) and all(mine & _identities(at, reader.operands[0]) for at, reader in readers or ())


def _readers(level: Level, name: str) -> list[tuple[Level, Operator]] | None:
    """The conds that read a value, through stacks of loops too; None where something else reads it."""
    readers: list[tuple[Level, Operator]] = []
    for op in level.graph.operators:
        if name not in op.reads:
            continue
        at = [n for n, o in enumerate(op.operands) if o == name]
        if op.primitive == "cond" and not op.effects and 0 not in at:
            readers.append((level, op))
            continue
        if op.primitive != "scan" or any(Scan.of(op).num_consts <= n < Scan.of(op).num_whole for n in at):
            return None
        body = level.body(op)
        inner = [_readers(body, body.graph.inputs[n].name) for n in at]
        if any(r is None for r in inner):
            return None
        readers += [r for readers_inside in inner for r in readers_inside or ()]
    stacks = level.stacked(name)
    if stacks is None:
        return None
    for stack in stacks:
        assert level.parent is not None
        outside = _readers(level.parent, stack)
        if outside is None:
            return None
        readers += outside
    return readers


def _identities(level: Level, operand: Any) -> set[Identity]:
    """What a value is, in its own graph and in those around it: equal identities are equal in every iteration."""
    if not isinstance(operand, str):
        return {("", repr(operand), ())}
    known: set[Identity] = {(level.path, operand, ())}
    if level.parent is None or level.scan is None:
        return known
    scan, sliced = Scan.of(level.scan), (level.depth,)
    names = [i.name for i in level.graph.inputs]
    if operand in names:
        n = names.index(operand)
        if n < scan.num_consts:
            known |= _identities(level.parent, level.scan.operands[n])
        elif n >= scan.num_whole:
            outside = _identities(level.parent, level.scan.operands[n])
            known |= {(path, name, (*depths, *sliced)) for path, name, depths in outside}
    for stack in level.stacked(operand) or ():
        known |= {(path, name, (*depths, *sliced)) for path, name, depths in _identities(level.parent, stack)}
    return known
