"""Every intermediate value of a program, as sharded and on one device, to find the operator at which they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.extend.core import Primitive

from autopar._compat.devices import world_devices
from autopar.api.numbers import Difference, difference, tolerance_of
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Layout, Literal, Operator, Output
from autopar.ir.primitives import SUMS
from autopar.lower.localize.base import bind, scalar
from autopar.lower.program import lower
from autopar.plan import OutputRecord, Plan
from autopar.runtime.hosts.arrays import put, whole

#: Bytes of intermediate values that are looked at in one run.
_CHUNK_BYTES = 1 << 30
#: Their results may be small differences of large operands: rounding counts against the operands.
_CANCELLING = SUMS | {"scan"}


def compare_operators(traced: Traced, plan: Plan, leaves: Sequence[Any]) -> tuple[Operator, Difference] | None:
    """The first operator whose result differs by more than rounding, and by how much; None if there is none.

    Args:
        traced: the function.
        plan: its plan.
        leaves: traced leaves of a call.
    """
    graph = traced.graph
    recorded = {r.id: r.results for r in plan.content.operators}
    sizes: dict[str, float] = {}
    arguments = [*leaves, *traced.closed_over]
    for i, leaf in zip(graph.inputs, arguments, strict=True):
        sizes[i.name] = difference(leaf, leaf).of
    for operators in _chunks([op for op in graph.operators if op.id in recorded]):
        values = [
            (v.name, v.type, layout) for op in operators for v, layout in zip(op.results, recorded[op.id], strict=True)
        ]
        outputs = tuple(Output(name, name, type) for name, type, _ in values)
        records = tuple(
            OutputRecord(name, str(type), str(Layout(Layout.parse(layout).dims))) for name, type, layout in values
        )
        part = Graph(graph.name, graph.inputs, graph.operators, outputs)
        bound = BoundGraph(part, traced.program.bounds, traced.program.constants)
        cut = replace(traced, program=bound, weak=(False,) * len(outputs))
        content = msgspec.structs.replace(plan.content, outputs=records, donated=())
        program = lower(cut, Plan(content), world_devices())
        placed = [put(_array(a), s) for a, s in zip(arguments, program.input_shardings, strict=True)]
        sharded = dict(zip((n for n, _, _ in values), map(whole, program.function(*placed)), strict=True))
        plain = dict(zip((n for n, _, _ in values), _on_one_device(cut, arguments), strict=True))
        for op in operators:
            differences = [difference(sharded[v.name], plain[v.name]) for v in op.results]
            for v, d in zip(op.results, differences, strict=True):
                sizes[v.name] = d.of
            known = [sizes.get(o, 0.0) for o in op.reads]
            base = max(known, default=0.0) if op.primitive in _CANCELLING else 0.0
            for v, d in zip(op.results, differences, strict=True):
                if d.norm > 10 * tolerance_of(plain[v.name].dtype) * max(d.of, base):
                    return op, max(differences, key=lambda e: e.relative)
    return None


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _chunks(operators: Sequence[Operator]) -> Iterator[list[Operator]]:
    chunk: list[Operator] = []
    size = 0
    for op in operators:
        here = sum(v.type.nbytes for v in op.results)
        if chunk and size + here > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(op)
        size += here
    if chunk:
        yield chunk


def _on_one_device(traced: Traced, arguments: Sequence[Any]) -> Sequence[Any]:
    """Outputs of the graph, every operator on whole arrays."""
    device = jax.local_devices()[0]
    here = [jax.device_put(_array(a), device) for a in arguments]

    def run(*arrays: Any) -> list[Any]:
        program = traced.program
        env: dict[str, Any] = dict(zip((i.name for i in program.graph.inputs), arrays, strict=True))
        for op in program.graph.operators:
            if op.primitive == "constant":
                results = [jax.numpy.asarray(program.constants[op.id])]
            else:
                bound = program.bounds[op.id]
                operands = [scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands]
                primitive: Primitive = bound.primitive
                results = bind(primitive, bound.params, operands)
            env.update(zip((v.name for v in op.results), results, strict=True))
        return [env[str(o.operand)] for o in program.graph.outputs]

    outputs: Sequence[Any] = jax.jit(run)(*here)
    return outputs
