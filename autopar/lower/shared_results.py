"""Results of a cond in which some branches save examples and others do not, at any depth of loops and branches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.loops import Scan

#: A value by the graph that makes it and the depths of the loops that took slices of it.
Identity: TypeAlias = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Level:
    """A graph among the bodies of loops and the branches around it.

    Args:
        graph: the graph.
        path: ids of the enclosing loops, and ids of conds with the number of the branch, each followed by ``/``.
        around: the loop whose body it is, or the cond whose branch; None for the step itself.
        parent: where that is.
        number: of the branch; None in a body.
    """

    graph: Graph
    path: str = ""
    around: Operator | None = None
    parent: Level | None = None
    number: int | None = None

    @property
    def depth(self) -> int:
        """Number of loops around it."""
        return 0 if self.parent is None else self.parent.depth + (self.number is None)

    @property
    def outside(self) -> dict[str, Operand]:
        """Outer values of a region's inputs: constants, carries at their start, stacks, operands."""
        if self.around is None:
            return {}
        given = self.around.operands[0 if self.number is None else 1 :]
        return dict(zip((i.name for i in self.graph.inputs), given, strict=True))

    def body(self, op: Operator) -> Level:
        """The body of ``op``, a scan of this graph."""
        return Level(op.region("body"), f"{self.path}{op.id}/", op, self)

    def branch(self, op: Operator, number: int) -> Level:
        """A branch of ``op``, a cond of this graph."""
        return Level(op.regions[number][1], f"{self.path}{op.id}/{number}/", op, self, number)

    def leaving(self, name: str) -> list[str] | None:
        """Results of the operator around that are the value ``name``, or stack it; None where it is carried on.

        A result of the step is None too.
        """
        at = [n for n, o in enumerate(self.graph.outputs) if o.operand == name]
        if not at:
            return []
        if self.around is None or (self.number is None and min(at) < Scan.of(self.around).num_carry):
            return None
        return [self.around.results[n].name for n in at]


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
        """The outer value that a branch passes on; None where it computes the value that it saves."""
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
            for number in range(len(op.regions)):
                branch = level.branch(op, number)
                yield from _shared(branch, {name for name, o in branch.outside.items() if o in of_batch})
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
    readers = _readers(level, name, ())
    mine = _identities(level, op.operands[0])
    return bool(readers) and all(mine & _identities(at, reader.operands[0]) for at, reader in readers or ())


def _readers(level: Level, name: str, left: tuple[Level, ...]) -> list[tuple[Level, Operator]] | None:
    """The conds that read a value, through stacks of loops and results of conds; None where something else reads it.

    Args:
        level: where the value is.
        name: its name.
        left: the branches that it left, the last one last: their conds' results are read in those branches of conds
            with the same predicates.
    """
    readers: list[tuple[Level, Operator]] = []
    for op in level.graph.operators:
        if name not in op.reads:
            continue
        at = [n for n, o in enumerate(op.operands) if o == name]
        if op.primitive == "cond" and not op.effects and 0 not in at:
            if not left:
                readers.append((level, op))
                continue
            if not _same_predicate(left[-1], level, op):
                return None
            assert left[-1].number is not None
            inside, first, still_left = level.branch(op, left[-1].number), 1, left[:-1]
        elif op.primitive == "scan" and not any(Scan.of(op).num_consts <= n < Scan.of(op).num_whole for n in at):
            inside, first, still_left = level.body(op), 0, left
        else:
            return None
        for n in at:
            inner = _readers(inside, inside.graph.inputs[n - first].name, still_left)
            if inner is None:
                return None
            readers += inner
    results = level.leaving(name)
    if results is None:
        return None
    for result in results:
        assert level.parent is not None
        outside = _readers(level.parent, result, left if level.number is None else (*left, level))
        if outside is None:
            return None
        readers += outside
    return readers


def _same_predicate(branch: Level, level: Level, op: Operator) -> bool:
    """Whether ``op`` takes the branch that the cond around ``branch`` takes."""
    assert branch.parent is not None and branch.around is not None
    return bool(_identities(branch.parent, branch.around.operands[0]) & _identities(level, op.operands[0]))


def _identities(level: Level, operand: Any) -> set[Identity]:
    """Identities of values in a graph and in those around it: equal identities are equal in every iteration.

    A value of a branch is a result of the cond where that branch is taken.
    """
    if not isinstance(operand, str):
        return {("", repr(operand), ())}
    operand = _first_equal(level.graph, operand)
    known: set[Identity] = {(level.path, operand, ())}
    if level.parent is None or level.around is None:
        return known
    names = [i.name for i in level.graph.inputs]
    sliced: tuple[int, ...] = () if level.number is not None else (level.depth,)
    same = _same_in_iterations(level)
    if operand in names:
        outside = _identities(level.parent, level.outside[operand])
        if operand in same:
            known |= outside
        elif names.index(operand) >= Scan.of(level.around).num_whole:
            known |= {(path, name, (*depths, *sliced)) for path, name, depths in outside}
    for result in level.leaving(operand) or ():
        known |= {(path, name, (*depths, *sliced)) for path, name, depths in _identities(level.parent, result)}
    return known


def _first_equal(graph: Graph, name: str) -> str:
    """The first result of a cond that is what ``name`` is in every branch, or of a loop that stacks the same.

    ``name`` itself where neither makes it.
    """
    op = graph.producers.get(name)
    if op is None or op.primitive not in ("cond", "scan"):
        return name
    at, first = [v.name for v in op.results].index(name), 0 if op.primitive == "cond" else Scan.of(op).num_carry
    if at < first:
        return name
    returned = [_returned(op, n) for n in range(first, at + 1)]
    return op.results[first + returned.index(returned[-1])].name


def _returned(op: Operator, result: int) -> list[Operand]:
    """Values that the regions of an operator return as one of its results."""
    operands = [(region, region.outputs[result].operand) for _, region in op.regions]
    return [_first_equal(region, o) if isinstance(o, str) else o for region, o in operands]


def _same_in_iterations(level: Level) -> set[str]:
    """Inputs of a body or a branch that are what the operator around is given: the constants of a loop."""
    names = list(level.outside)
    if level.around is None or level.number is not None:
        return set(names)
    return set(names[: Scan.of(level.around).num_consts])
