"""Branches that keep different things in one buffer for their backward pass get a buffer each.

jax keeps what the branches of a ``cond`` save in common results, matched by shape alone. Where a batch has the size of
a parameter one branch saves examples and another the parameter in the same result, which then can be cut into
microbatches for one of them only. `shared_results` finds such results, at any depth of loops and branches.
`with_own_buffers` rewrites them: the branch that saves examples keeps the result; another returns zeros in it and what
it saved in a result of its own, or nothing where the branch of the backward pass can take the operand itself. A loop
stacks what its branches save; the loop of the backward pass gets a stack more, or the operand. A branch of another
cond hands on what branches inside of it save; the cond of the backward pass takes an operand more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar._compat.primitives import switched
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.loops import Scan
from autopar.lower.localize.base import scalar
from autopar.lower.retrace import Recorder, retraced, run_whole

#: A value by the graph that makes it and the depths of the loops that took slices of it.
Identity: TypeAlias = tuple[str, str, tuple[int, ...]]


def with_own_buffers(traced: Traced) -> Traced:
    """``traced``, with a result of its own for what a branch saves next to examples of other branches."""
    shared = shared_results(traced.graph)
    if not shared:
        return traced

    def run(values: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        frame = _Frame(dict(values))
        _BranchRun(shared, recorder).graph(traced.program, frame)
        return frame.env

    return retraced(traced, run)


#: Number of a branch; of a branch inside of another the number of that one first.
_Branch: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Saved:
    """Values that a branch saves apart.

    Args:
        operand: a name, or a literal.
        same: for each stack that the shared result is in, the outermost first, whether this is the same in every
            iteration and so has no such dim.
    """

    operand: Operand
    same: tuple[bool, ...] = ()


@dataclass(frozen=True)
class _Leaving:
    """Values saved apart by inner branches that a branch hands on.

    Args:
        name: of the cond's result.
        number: of the branch.
        saved: what it is there.
        shape: of the array.
        dtype: likewise.
    """

    name: str
    number: int
    saved: _Saved
    shape: tuple[int, ...]
    dtype: Any


@dataclass
class _Frame:
    """Values of one run of a graph.

    Args:
        env: by name.
        apart: by shared result and branch, what that branch saved; a branch inside of another is named by both.
        path: as in `Shared`.
    """

    env: dict[str, Any]
    separate: dict[tuple[str, _Branch], _Saved] = field(default_factory=dict)
    path: str = ""

    def read(self, operand: Operand) -> Any:
        """The value of an operand."""
        return scalar(operand) if isinstance(operand, Literal) else self.env[operand]

    def saved_separately(self, operand: Operand) -> list[tuple[_Branch, _Saved]]:
        """(branch, what it saved apart from the value ``operand``)."""
        return [(b, saved) for (name, b), saved in self.separate.items() if name == operand]


@dataclass(frozen=True)
class _BranchRun:
    """A step run with the results of `Shared` apart."""

    shared: Sequence[Shared]
    recorder: Recorder

    def graph(self, bound: BoundGraph, frame: _Frame) -> None:
        """Puts every value of ``bound`` into ``frame``."""
        for op in bound.graph.operators:
            saved = [s for s in self.shared if s.path == frame.path and s.cond.id == op.id]
            takes = any(frame.saved_separately(o) for o in op.operands)
            inside = self._inside(f"{frame.path}{op.id}/")
            if op.primitive == "scan" and (takes or inside):
                with self.recorder.around(op):
                    self._scan(bound, op, frame)
            elif op.primitive == "cond" and (takes or saved or inside):
                with self.recorder.around(op):
                    self._cond(bound, op, saved, frame)
            else:
                part = BoundGraph(Graph(bound.graph.name, (), (op,), ()), bound.bounds, bound.constants)
                frame.env.update(run_whole(part, frame.env, self.recorder))

    def _inside(self, path: str) -> bool:
        """Whether a shared result lies in a loop or a branch, or in one inside of it."""
        return any(s.path.startswith(path) for s in self.shared)

    def _cond(self, bound: BoundGraph, op: Operator, saved: Sequence[Shared], frame: _Frame) -> None:
        """A cond that saves some results apart, takes some that were, does both, or has branches inside that do."""
        more: list[tuple[Shared, int]] = []
        for s in saved:
            for branch in s.others:
                passed = s.operand(branch)
                if passed is None:
                    more.append((s, branch))
                frame.separate[s.name, (branch,)] = _Saved(f"{s.name}@{branch}" if passed is None else passed)
        given = [frame.read(o) for o in op.operands]
        wanted = [(n, b, o) for n, operand in enumerate(op.operands) for b, o in frame.saved_separately(operand) if n]
        operands = [*given[1:], *(frame.read(o.operand) for _, _, o in wanted)]

        def branch_of(number: int, leaving: Sequence[_Leaving]) -> Any:
            def run(*operands: Any) -> list[Any]:
                inner, results = self._branch(bound, op, number, frame, operands, wanted)
                kept = [results[s.result] if b == number else _zeros(s) for s, b in more]
                for s in saved:
                    if number in s.others:
                        results[s.result] = _zeros(s)
                leave = [
                    jnp.asarray(inner.read(x.saved.operand)) if x.number == number else jnp.zeros(x.shape, x.dtype)
                    for x in leaving
                ]
                return [*results, *kept, *leave]

            return run

        leaving = self._leaving_branches(bound, op, frame, operands, wanted)
        branches = [branch_of(n, leaving) for n in range(len(op.regions))]
        platforms = bound.bounds[op.id].params.get("branches_platforms")
        results = switched(given[0], branches, operands, platforms)
        names = [*(v.name for v in op.results), *(f"{s.name}@{b}" for s, b in more), *(x.name for x in leaving)]
        frame.env.update(zip(names, results, strict=True))

    def _branch(
        self, bound: BoundGraph, op: Operator, number: int, frame: _Frame, operands: Sequence[Any],
        wanted: Sequence[tuple[int, _Branch, _Saved]],
    ) -> tuple[_Frame, list[Any]]:  # fmt: skip
        """A branch run with ``operands``: those of the cond, then those ``wanted`` apart. Its frame and its results."""
        region = bound.bounds[op.id].regions[op.regions[number][0]]
        inputs = [i.name for i in region.graph.inputs]
        inner = _Frame(dict(zip(inputs, operands, strict=False)), path=f"{frame.path}{op.id}/{number}/")
        for (n, branch, saved), value in zip(wanted, operands[len(inputs) :], strict=True):
            if branch == (number,):
                inner.env[inputs[n - 1]] = value
            elif branch[0] == number:
                name = f"{inputs[n - 1]}@{_text(branch[1:])}"
                inner.env[name] = value
                inner.separate[inputs[n - 1], branch[1:]] = _Saved(name, saved.same)
        self.graph(region, inner)
        return inner, [jnp.asarray(inner.read(o.operand)) for o in region.graph.outputs]

    def _saved_inside(
        self, bound: BoundGraph, op: Operator, number: int, frame: _Frame, operands: Sequence[Any],
        wanted: Sequence[tuple[int, _Branch, _Saved]],
    ) -> tuple[Mapping[tuple[str, _Branch], _Saved], list[Any]]:  # fmt: skip
        """Values that branches inside of a branch save apart, as in `_Frame.separate`, with their shapes."""
        separate: dict[tuple[str, _Branch], _Saved] = {}

        def run(*operands: Any) -> list[Any]:
            inner, _ = self._branch(bound, op, number, frame, operands, wanted)
            separate.update(inner.separate)
            return [jnp.asarray(inner.read(saved.operand)) for saved in inner.separate.values()]

        shapes = jax.eval_shape(run, *operands)
        return separate, shapes

    def _leaving_branches(
        self, bound: BoundGraph, op: Operator, frame: _Frame, operands: Sequence[Any],
        wanted: Sequence[tuple[int, _Branch, _Saved]],
    ) -> list[_Leaving]:  # fmt: skip
        """Results that a cond has besides its own: values that branches inside of its branches save apart.

        What the cond was given is recorded in ``frame`` as what was saved.
        """
        leaving: list[_Leaving] = []
        for number, (_, region) in enumerate(op.regions):
            path = f"{frame.path}{op.id}/{number}/"
            if not self._inside(path) and all(len(b) == 1 or b[0] != number for _, b, _ in wanted):
                continue
            separate, shapes = self._saved_inside(bound, op, number, frame, operands, wanted)
            outside = dict(zip((i.name for i in region.inputs), op.operands[1:], strict=True))
            for ((name, branch), saved), shape in zip(separate.items(), shapes, strict=True):
                results = [v.name for v, o in zip(op.results, region.outputs, strict=True) if o.operand == name]
                passed = outside.get(str(saved.operand))
                saved_name = f"{op.id}/{number}/{name}@{_text(branch)}"
                for result in results:
                    operand = saved_name if passed is None else passed
                    frame.separate[result, (number, *branch)] = _Saved(operand, saved.same)
                if results and passed is None:
                    leaving.append(_Leaving(saved_name, number, saved, shape.shape, shape.dtype))
        return leaving

    def _scan(self, bound: BoundGraph, op: Operator, frame: _Frame) -> None:
        """A loop with such conds in its body."""
        scan = Scan.of(op)
        params, region = bound.bounds[op.id].params, bound.bounds[op.id].regions["body"]
        inputs = [i.name for i in region.graph.inputs]
        consts, initial, stacks = scan.split([frame.read(o) for o in op.operands])
        taken = [(n, b, o) for n, operand in enumerate(op.operands) for b, o in frame.saved_separately(operand)]
        sliced = [(n, b, o) for n, b, o in taken if n >= scan.num_whole and not o.same[0]]
        leaving: list[tuple[str, _Branch, _Saved]] = []  # a shared result of the body, its branch, what it saved

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            stacked, more = slices[: len(stacks)], slices[len(stacks) :]
            inner = _Frame(dict(zip(inputs, [*consts, *carry, *stacked], strict=True)), path=f"{frame.path}{op.id}/")
            values = {(n, b): frame.read(o.operand) for n, b, o in taken}
            values |= {(n, b): value for (n, b, _), value in zip(sliced, more, strict=True)}
            for n, b, o in taken:
                name = f"{inputs[n]}@{_text(b)}"
                inner.env[name] = values[n, b]
                inner.separate[inputs[n], b] = _Saved(name, o.same[1:] if n >= scan.num_whole else o.same)
            self.graph(region, inner)
            leaving[:] = _leaving(op, scan, inner, frame)
            outputs = [jnp.asarray(inner.read(o.operand)) for o in region.graph.outputs]
            values_saved = [jnp.asarray(inner.read(o.operand)) for _, _, o in leaving]
            return outputs[: scan.num_carry], [*outputs[scan.num_carry :], *values_saved]

        xs = [*stacks, *(frame.read(o.operand) for _, _, o in sliced)]
        carry, ys = lax.scan(
            body, initial, xs, length=scan.length, reverse=bool(params["reverse"]), unroll=params.get("unroll", 1)
        )
        plain = len(op.results) - scan.num_carry
        frame.env.update(zip((v.name for v in op.results), [*carry, *ys[:plain]], strict=True))
        for (name, b, saved), stack in zip(leaving, ys[plain:], strict=True):
            for result in _stacks(op, scan, name):
                frame.env[f"{result}@{_text(b)}"] = stack
                frame.separate[result, b] = _Saved(f"{result}@{_text(b)}", (False, *saved.same))


def _leaving(op: Operator, scan: Scan, inner: _Frame, frame: _Frame) -> list[tuple[str, _Branch, _Saved]]:
    """Stacks that a loop makes of values that branches of its body save apart.

    What the loop was given, a constant or a stack, is recorded in ``frame`` as what was saved.
    """
    carried = range(scan.num_consts, scan.num_whole)
    given = {i.name: n for n, i in enumerate(scan.body.inputs) if n not in carried}
    leaving = []
    for (name, b), saved in inner.separate.items():
        stacks = _stacks(op, scan, name)
        if saved.operand not in given:
            leaving += [(name, b, saved)] if stacks else []
            continue
        for result in stacks:
            n = given[str(saved.operand)]
            frame.separate[result, b] = _Saved(op.operands[n], (n < scan.num_consts, *saved.same))
    return leaving


def _stacks(op: Operator, scan: Scan, name: str) -> list[str]:
    """Results of a loop that stack the value ``name`` of its body."""
    return [v.name for v, o in zip(op.results, scan.body.outputs, strict=True) if o.operand == name]


def _zeros(s: Shared) -> Any:
    type = s.cond.results[s.result].type
    return jnp.zeros(type.shape, numpy_dtype(type.dtype))


def _text(branch: _Branch) -> str:
    return ".".join(map(str, branch))


@dataclass(frozen=True)
class Level:
    """A graph of the step, of a loop's body or of a branch, with the graph around it.

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
        path: ids of the enclosing loops, and ids of conds with the number of the branch, each followed by ``/``.
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
