"""Programs that are interpreted and traced again: another program with the same arguments and results.

Rewritings that run operators start here. `retraced` makes a step of a function that runs the parts of another one;
`Recorder` hands out the scopes under which operators are traced again; `run_whole` and `run_some` run operators on
whole values, `microbatch_function` on one microbatch's pieces. `Step` is a program with the abstract values of its
inputs.

`RetracedLoop` is a loop with another body. Rewritings of loops over layers take the loop's operands apart, run its
body, or a part of it, in trips of a new loop, and give what that makes the names of the old results. `RetracedLoop.of`
begins; `over` makes the new loop; `trip` runs the body. What a trip reads, writes and leaves out is the rewriting's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.primitives import bind
from autopar.frontend import Bound, BoundGraph, Traced
from autopar.frontend.build import build_graph
from autopar.frontend.order import order
from autopar.frontend.retraced import Labels, may_splice, spliced
from autopar.ir import Graph, Input, Layout, Literal, Operand, Operator, Output
from autopar.ir.analysis import closure
from autopar.ir.loops import Scan
from autopar.ir.phases import marks_of
from autopar.ir.primitives import ALIASES
from autopar.lower.interpreter import Interpreter, Sharded
from autopar.lower.localize.base import scalar
from autopar.microbatch import AXIS, Microbatching, pseudo_mesh
from autopar.recompute.rewrite import AGAIN, SCOPE
from autopar.sharding.reshard import PathTables


@dataclass(frozen=True, eq=False)
class Step:
    """A train step as a function from a flat list of arrays to another.

    Args:
        program: its graph, with the primitives and parameters that jax binds to run the operators.
        avals: shape and dtype of each input, as jax has them.
    """

    program: BoundGraph
    avals: tuple[Any, ...]

    @property
    def graph(self) -> Graph:
        """The graph, without jax."""
        return self.program.graph


def step_of(traced: Traced) -> Step:
    """The step of a traced function; what it closes over are inputs after the others."""
    return Step(traced.program, (*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)))


@dataclass
class Recorder:
    """Gives operators that are traced again name scopes, by which the new graph is matched with the old.

    Args:
        labels: scopes that were given, with the operator of each.
        copies: by id of an operator that the backward pass runs again the id of the original.
        splices: whether only a graph is wanted and no jaxpr to run, so that operators may be copied without jax.
    """

    labels: Labels = field(default_factory=Labels)
    copies: dict[str, str] = field(default_factory=dict)
    splices: bool = False

    @staticmethod
    def after(program: BoundGraph, *, splices: bool = False) -> Recorder:
        """A recorder for another trace of ``program``, whose operators may have scopes of earlier traces.

        Args:
            program: the graph that is traced again.
            splices: whether only a graph is wanted and no jaxpr to run, so that operators may be copied without jax.
        """
        return Recorder(Labels.after(program.labels), splices=splices)

    @contextmanager
    def around(self, op: Operator) -> Iterator[None]:
        """Marks operators that are traced inside as ``op`` of the old graph."""
        with jax.named_scope(self.labels.mark(op.scope, op.source, self.copies.get(op.id, op.id), op.marks)):
            yield

    @contextmanager
    def made_for(self, scope: str, *marks: str) -> Iterator[None]:
        """Marks operators that are traced inside as new: they stand for none of the old graph.

        Args:
            scope: the user's name scope that they get.
            marks: attributes that they get.
        """
        with jax.named_scope(self.labels.mark(scope, None, None, marks_of(marks))):
            yield


def part_of(bound: BoundGraph, ids: Sequence[str], inputs: Sequence[Input], outputs: Sequence[str]) -> BoundGraph:
    """The operators ``ids`` of a graph as a graph of its own.

    Args:
        bound: the whole graph.
        ids: operators, in running order.
        inputs: values that they take from outside.
        outputs: values that are asked for.
    """
    graph = bound.graph
    kept = set(ids)
    operators = tuple(op for op in graph.operators if op.id in kept)
    wanted = tuple(Output(name, name, graph.types[name]) for name in outputs)
    return BoundGraph(Graph(graph.name, tuple(inputs), operators, wanted), bound.bounds, bound.constants)


def run_whole(part: BoundGraph, values: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Every value of the graph ``part``, from the ``values`` of its inputs by name."""
    env, unchanged = dict(values), list[Operator]()

    def read(operand: Any) -> Any:
        return scalar(operand) if isinstance(operand, Literal) else env[operand]

    def splice() -> None:
        env.update(spliced(unchanged, part.bounds, recorder.copies, env) if unchanged else {})
        unchanged.clear()

    for op in part.graph.operators:
        if op.primitive == "constant" and op.id in part.constants:
            env[op.results[0].name] = jnp.asarray(part.constants[op.id])
            continue
        if recorder.splices and may_splice(op):
            unchanged.append(op)
            continue
        splice()
        bound = part.bounds[op.id]
        with recorder.around(op):
            outputs = bind(bound.primitive, bound.params, [read(o) for o in op.operands])
        env.update(zip((v.name for v in op.results), outputs, strict=True))
    splice()
    return env


def run_some(
    bound: BoundGraph, operators: Sequence[Operator], values: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any]:
    """Every value that some operators of a graph compute, from ``values`` of what they read, by name."""
    return run_whole(replace(bound, graph=replace(bound.graph, operators=tuple(operators))), values, recorder)


def microbatch_function(
    bound: BoundGraph,
    microbatching: Microbatching,
    recorder: Recorder,
    ids: Sequence[str],
    taken: Sequence[str],
    wanted: Sequence[tuple[str, Layout | None]],
    states: Mapping[str, Layout] | None = None,
) -> Callable[[Any, Sequence[Any]], list[Any]]:
    """The function of one microbatch: (its number, pieces of ``taken``) -> pieces of ``wanted``.

    Args:
        bound: the whole step.
        microbatching: the analysis.
        recorder: gives operators that are traced again the scopes of the old ones.
        ids: operators of the loop to run, in running order.
        taken: values that they take from elsewhere.
        wanted: values asked for, each with its layout over the axis of microbatches; None for the one it has.
        states: from `value_layouts`, where they are known.
    """
    graph = bound.graph
    part = part_of(bound, ids, [Input(n, graph.types[n]) for n in taken], [n for n, _ in wanted])
    if microbatching.count == 1:

        def at_once(number: Any, arrays_of_microbatch: Sequence[Any]) -> list[Any]:
            env = run_whole(part, dict(zip(taken, arrays_of_microbatch, strict=True)), recorder)
            return [env[n] for n, _ in wanted]

        return at_once
    states = value_layouts(graph, microbatching) if states is None else states
    layouts = [states[n] for n in taken]
    targets = [states[n] if k is None else k for n, k in wanted]
    tables = PathTables(pseudo_mesh(microbatching.count), _never)

    def microbatch(number: Any, arrays_of_microbatch: Sequence[Any]) -> list[Any]:
        decisions = Sharded(
            microbatching.operands,
            microbatching.results,
            {},
            tables,
            index=lambda axes: number,
            around=recorder.around,
        )
        return Interpreter(decisions).run(part, arrays_of_microbatch, layouts, targets)

    return microbatch


def value_layouts(graph: Graph, microbatching: Microbatching) -> dict[str, Layout]:
    """Layout over the axis of microbatches of everything that the loop reads or makes."""
    layouts: dict[str, Layout] = {}
    whole: dict[int, Layout] = {}  # by rank
    inside = set(microbatching.body)
    for i in graph.inputs:
        layouts[i.name] = body_layout(graph, microbatching, i.name)
    for op in graph.operators:
        results = microbatching.results.get(op.id) if op.id in inside else None
        if results is not None:
            layouts.update(zip((v.name for v in op.results), results, strict=True))
        elif op.id in inside and op.primitive in ALIASES:
            layouts.update((v.name, layouts[str(o)]) for v, o in zip(op.results, op.operands, strict=True))
        else:
            for v in op.results:
                rank = len(v.type.shape)
                if rank not in whole:
                    whole[rank] = Layout.replicated(rank)
                layouts[v.name] = whole[rank]
    return layouts


def body_layout(graph: Graph, microbatching: Microbatching, name: str) -> Layout:
    """Layout over the axis of microbatches in which the loop is given a value from outside."""
    type = graph.types[name]
    if name not in microbatching.batch:
        return Layout.replicated(type.rank)
    return Layout(tuple((AXIS,) if d == microbatching.batch[name] else () for d in range(type.rank)))


def _never(kind: str, bytes: float, axes: tuple[str, ...]) -> float:
    """Between microbatches nothing can be sent."""
    return 1e9


def microbatches_of(array: Any, count: int, dim: int) -> Any:
    """``array`` as a stack of ``count`` consecutive pieces along ``dim``; the stack's dim comes first."""
    shape = (*array.shape[:dim], count, array.shape[dim] // count, *array.shape[dim + 1 :])
    return jnp.moveaxis(lax.reshape(array, shape), dim, 0) if dim else lax.reshape(array, shape)


def concatenated(stack: Any, dim: int) -> Any:
    """One array of the pieces of a stack, concatenated along ``dim``."""
    moved = jnp.moveaxis(stack, 0, dim) if dim else stack
    return lax.reshape(moved, (*moved.shape[:dim], moved.shape[dim] * moved.shape[dim + 1], *moved.shape[dim + 2 :]))


def retraced(traced: Traced, run: Callable[[dict[str, Any], Recorder], Mapping[str, Any]]) -> Traced:
    """A step that computes the same as ``traced`` in another way, traced from ``run``.

    Args:
        traced: a step.
        run: from the arrays of its inputs by name, and the recorder of scopes, to those that its outputs name.
    """
    shapes = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
    program = retraced_bound(traced.program, shapes, run)
    return replace(traced, program=replace(program, graph=order(program.graph), origins={}))


def retraced_bound(
    bound: BoundGraph, shapes: Sequence[Any], run: Callable[[dict[str, Any], Recorder], Mapping[str, Any]]
) -> BoundGraph:
    """A graph that computes the same as ``bound`` in another way, traced from ``run``; operators keep their order.

    Args:
        bound: a graph.
        shapes: of its inputs, as jax knows them.
        run: from the arrays of its inputs by name, and the recorder of scopes, to those that its outputs name.
    """
    graph, recorder = bound.graph, Recorder.after(bound, splices=True)

    def step(*arrays: Any) -> list[Any]:
        env = run(dict(zip((i.name for i in graph.inputs), arrays, strict=True)), recorder)
        return [
            jnp.asarray(scalar(o.operand)) if isinstance(o.operand, Literal) else env[o.operand] for o in graph.outputs
        ]

    closed = jax.make_jaxpr(step)(*shapes)
    inputs = [(i.name, i.role) for i in graph.inputs]
    program = build_graph(closed, graph.name, inputs, [o.path for o in graph.outputs], recorder.labels)
    new = program.graph
    outputs = tuple(replace(n, updates=o.updates) for n, o in zip(new.outputs, graph.outputs, strict=True))
    return replace(program, graph=Graph(graph.name, new.inputs, new.operators, outputs))


@dataclass(frozen=True)
class RetracedLoop:
    """A loop as it is traced again.

    Args:
        op: the loop.
        scan: its parts.
        bound: its primitive and parameters.
        recorder: gives operators that are traced again the scopes of the old ones.
        consts: what each trip takes whole.
        initial: what enters the first trip.
        names: of the stacks that it takes in slices; "" of a literal.
        stacks: these.
    """

    op: Operator
    scan: Scan
    bound: Bound
    recorder: Recorder
    consts: Sequence[Any]
    initial: Sequence[Any]
    names: Sequence[str]
    stacks: Sequence[Any]

    @staticmethod
    def of(bound: BoundGraph, op: Operator, env: Mapping[str, Any], recorder: Recorder, mark: str = "") -> RetracedLoop:
        """The loop ``op`` of a graph.

        Args:
            bound: the graph.
            op: the loop.
            env: values that it takes, by name.
            recorder: gives operators that are traced again the scopes of the old ones.
            mark: an attribute that the new loop gets, which its scope says too.
        """
        scan = Scan.of(op)
        consts, initial, stacks = scan.split([scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands])
        names = [o if isinstance(o, str) else "" for o in op.operands[scan.num_whole :]]
        if mark:
            op = replace(op, scope=f"{op.scope}/{mark}" if op.scope else mark, marks=marks_of(op.marks, (mark,)))
        return RetracedLoop(op, scan, bound.bounds[op.id], recorder, consts, initial, names, stacks)

    @property
    def region(self) -> BoundGraph:
        """Its body."""
        return self.bound.regions["body"]

    @property
    def results(self) -> tuple[list[str], list[str]]:
        """Names of its carries and stacks."""
        return self.scan.split_results([v.name for v in self.op.results])

    def over(self, body: Any, initial: Any, xs: Any, length: int | None = None, unroll: Any = 1) -> tuple[Any, Any]:
        """``lax.scan`` in the direction of this loop, under its marks.

        Args:
            body: of (carries, slices), gives (carries, slices of results).
            initial: carries.
            xs: stacks.
            length: number of trips, where there may be no stacks.
            unroll: trips that the compiler sees at once.
        """
        reverse = bool(self.bound.params["reverse"])
        with self.recorder.around(self.op):
            carry, ys = lax.scan(body, initial, xs, length=length, reverse=reverse, unroll=unroll)
        return carry, ys

    def values(self, carry: Sequence[Any], slices: Sequence[Any]) -> dict[str, Any]:
        """Inputs of its body in a trip, by name."""
        names = (i.name for i in self.region.graph.inputs)
        return dict(zip(names, [*self.consts, *carry, *slices], strict=True))

    def trip(
        self, carry: Sequence[Any], slices: Sequence[Any], wanted: Sequence[int], *, again: bool = False
    ) -> list[Any]:
        """Outputs of its body, those whose numbers are ``wanted``.

        Args:
            carry: what enters a layer.
            slices: of its stacks.
            wanted: numbers among carries and slices of results.
            again: whether this is the second run, in the backward pass.
        """
        graph = self.region.graph
        outputs = [graph.outputs[n].operand for n in wanted]
        operators = closure(graph.operators, outputs)
        if again:
            operators = [_recomputed(o) for o in operators]
        part = replace(self.region, graph=Graph(graph.name, graph.inputs, tuple(operators), graph.outputs))
        values = run_whole(part, self.values(carry, slices), self.recorder)
        return [read(o, values) for o in outputs]


def read(operand: Operand, values: Mapping[str, Any]) -> Any:
    """The array of an operand; a literal as one of its own."""
    return jnp.asarray(scalar(operand)) if isinstance(operand, Literal) else values[operand]


def _recomputed(op: Operator) -> Operator:
    """An operator that runs again in the backward pass."""
    return replace(op, scope=f"{op.scope}/{SCOPE}" if op.scope else SCOPE, marks=marks_of(op.marks, AGAIN))
