"""A traced step that is interpreted and traced again: another program with the same arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend import BoundGraph, Traced
from autopar.frontend.build import build_graph
from autopar.frontend.order import order
from autopar.ir import Graph, Literal
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder


def retraced(traced: Traced, run: Callable[[dict[str, Any], Recorder], Mapping[str, Any]]) -> Traced:
    """The step that ``run`` makes of a traced one.

    Args:
        traced: a step.
        run: from the arrays of its inputs by name to those that its outputs name; applies operators under the marks of
            the recorder.
    """
    shapes = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
    program = retraced_bound(traced.program, shapes, run)
    return replace(traced, program=replace(program, graph=order(program.graph), origins={}))


def retraced_bound(
    bound: BoundGraph, shapes: Sequence[Any], run: Callable[[dict[str, Any], Recorder], Mapping[str, Any]]
) -> BoundGraph:
    """The graph that ``run`` makes of a bound one, whose operators keep their order.

    Args:
        bound: a graph.
        shapes: of its inputs, as jax knows them.
        run: as of `retraced`.
    """
    graph, recorder = bound.graph, Recorder.behind(bound, splices=True)

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
