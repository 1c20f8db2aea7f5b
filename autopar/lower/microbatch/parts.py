"""The parts of a bound graph, run as functions while jax traces: on whole values, or on one microbatch's pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.primitives import bind
from autopar.frontend import BoundGraph
from autopar.frontend.retraced import Labels, may_splice, spliced
from autopar.ir import Graph, Input, Layout, Literal, Operator, Output
from autopar.ir.phases import marks_of
from autopar.ir.primitives import ALIASES
from autopar.lower.decisions import Sharded
from autopar.lower.interpreter import Interpreter
from autopar.lower.localize.base import scalar
from autopar.microbatch import AXIS, Microbatching, pseudo_mesh
from autopar.sharding.reshard import PathTables


@dataclass
class Recorder:
    """Hands out the scopes under which operators are traced again, and what each stands for.

    Args:
        labels: what was handed out.
        copies: operators that stand for others, by id: those that run again in the backward pass.
        splices: whether the trace is for `build_graph` alone, so that operators may be taken over without jax.
    """

    labels: Labels = field(default_factory=Labels)
    copies: dict[str, str] = field(default_factory=dict)
    splices: bool = False

    @staticmethod
    def behind(program: BoundGraph, *, splices: bool = False) -> Recorder:
        """For another trace of ``program``, whose regions may have marks of earlier traces; ``splices`` as above."""
        return Recorder(Labels.behind(program.labels), splices=splices)

    @contextmanager
    def around(self, op: Operator) -> Iterator[None]:
        """While ``op`` is applied; what jax records then is taken for it by `autopar.frontend.build_graph`."""
        with jax.named_scope(self.labels.mark(op.scope, op.source, self.copies.get(op.id, op.id), op.marks)):
            yield

    @contextmanager
    def made_for(self, scope: str, *marks: str) -> Iterator[None]:
        """While something is applied that stands for no operator.

        Args:
            scope: in which it is.
            marks: what it is.
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
    """Every value of ``part`` from the ``values`` of its inputs: taken over by the trace, or by jax's primitives."""
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
    """`run_whole` of some operators of a graph, in running order."""
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
        recorder: see there.
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
    """The pieces of a stack, side by side along ``dim``: what `microbatches_of` undoes."""
    moved = jnp.moveaxis(stack, 0, dim) if dim else stack
    return lax.reshape(moved, (*moved.shape[:dim], moved.shape[dim] * moved.shape[dim + 1], *moved.shape[dim + 2 :]))
