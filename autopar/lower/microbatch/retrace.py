"""A traced step that is interpreted and traced again: another program with the same arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend import Traced
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
    graph = traced.graph
    recorder = Recorder.behind(traced.program)

    def step(*arrays: Any) -> list[Any]:
        env = run(dict(zip((i.name for i in graph.inputs), arrays, strict=True)), recorder)
        return [
            jnp.asarray(scalar(o.operand)) if isinstance(o.operand, Literal) else env[o.operand] for o in graph.outputs
        ]

    shapes = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
    closed = jax.make_jaxpr(step)(*shapes)
    inputs = [(i.name, i.role) for i in graph.inputs]
    program = build_graph(closed, graph.name, inputs, [o.path for o in graph.outputs], recorder.labels)
    traced_graph = program.graph
    outputs = tuple(
        replace(new, updates=old.updates) for new, old in zip(traced_graph.outputs, graph.outputs, strict=True)
    )
    ordered = order(Graph(graph.name, traced_graph.inputs, traced_graph.operators, outputs))
    return replace(traced, program=replace(program, graph=ordered, origins={}))
