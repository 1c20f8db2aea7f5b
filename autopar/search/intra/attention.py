"""Attention in blocks as the planner prices it: seconds, memory, and whether scores that a mask leaves empty are made.

On one device leaving them out costs nothing. On a ring tokens are dealt out in halves and brought home again, so that
devices do the same work (`autopar.lower.localize.attention`): done where the products that are left out take longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.cost import ATTENTIONS, CostModel, product_dtype
from autopar.cost.attention import (
    attention_flops,
    attention_products,
    halved_shapes,
    score_traffic_bytes,
    score_width,
    units_of_halves,
    workspace_bytes,
)
from autopar.ir import Operator, TensorType, item_bytes
from autopar.ir.blockwise import ATTENTION, BACKWARD, AttentionSpec
from autopar.sharding import Strategy

Shapes = list[tuple[int, ...]]


def skips_masked(
    cost: CostModel, mesh: LogicalMesh, strategy: Strategy, op: Operator, types: Sequence[TensorType]
) -> bool:
    """Whether an operator leaves out scores that a mask leaves empty: where it can, and that is faster.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        strategy: of the operator.
        op: any operator.
        types: of its operands.
    """
    if op.primitive not in ATTENTIONS:
        return False
    if not AttentionSpec.of(op).has_halves(_shapes(mesh, strategy, types)):
        return False
    if not strategy.rings:
        return True
    axes = strategy.rings[0].axes
    sent_s = sum(cost.collective_s("collective-permute", b, axes, mesh) for _, b in dealt(mesh, strategy, op, types))
    whole_s, left_s = (_busy_s(cost, mesh, strategy, op, types, halves=h) for h in (False, True))
    return left_s + float(sent_s) < whole_s


def dealt(
    mesh: LogicalMesh, strategy: Strategy, op: Operator, types: Sequence[TensorType]
) -> Iterator[tuple[int, int]]:
    """Messages of causal ring attention that deal tokens to devices in another order, so that each has as much work.

    (operand, bytes) of each message; a message of a result has the first operand.

    Args:
        mesh: the logical mesh.
        strategy: with a ring.
        op: an operator of attention.
        types: of its operands.
    """
    spec, seen = AttentionSpec.of(op), set[object]()
    for n, (labels, layout, type) in enumerate(zip(spec.operands, strategy.operand_layouts, types, strict=True)):
        if op.operands[n] in seen or (op.primitive == BACKWARD and n == 3):
            continue
        if n in (1, 2) or spec.rows in labels:
            seen.add(op.operands[n])
            yield from [(n, layout.local_bytes(type, mesh.sizes) // 2)] * 2
    if op.primitive == BACKWARD:  # of each row the sum of the result times its gradient
        yield from [(0, strategy.operand_layouts[4].local_bytes(types[4], mesh.sizes) // 2)] * 2
    for layout, v in zip(strategy.result_layouts, op.results, strict=True):
        yield from [(0, layout.local_bytes(v.type, mesh.sizes) // 2)] * 2


def attention_s(
    cost: CostModel, mesh: LogicalMesh, strategy: Strategy, op: Operator, types: Sequence[TensorType]
) -> float:
    """Seconds of attention in blocks on one device: its products, and the scores that they write and read.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        strategy: of the operator.
        op: an operator of attention.
        types: of its operands.
    """
    return _busy_s(cost, mesh, strategy, op, types, halves=skips_masked(cost, mesh, strategy, op, types))


def workspaces(
    cost: CostModel, mesh: LogicalMesh, op: Operator, strategies: Sequence[Strategy], types: Sequence[TensorType]
) -> NDArray[np.float64]:
    """Bytes a device that attention in blocks needs while it runs, by strategy.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        op: an operator of attention.
        strategies: its strategies.
        types: of its operands.
    """

    def of(s: Strategy) -> int:
        shapes = _shapes(mesh, s, types)
        results = [k.local_shape(v.type.shape, mesh.sizes) for k, v in zip(s.result_layouts, op.results, strict=True)]
        arriving = {r.operand: s.operand_layouts[r.operand].local_bytes(types[r.operand], mesh.sizes) for r in s.rings}
        more = sum(arriving.values())
        if skips_masked(cost, mesh, s, op, types):
            shapes = halved_shapes(op, shapes)
            given = {n for n, _ in dealt(mesh, s, op, types)} if s.rings else set()
            more += sum(s.operand_layouts[n].local_bytes(types[n], mesh.sizes) for n in given)
        return workspace_bytes(op, shapes, results) + more

    return np.array([of(s) for s in strategies], float)


def _shapes(mesh: LogicalMesh, strategy: Strategy, types: Sequence[TensorType]) -> Shapes:
    return [k.local_shape(t.shape, mesh.sizes) for k, t in zip(strategy.operand_layouts, types, strict=True)]


def _busy_s(
    cost: CostModel,
    mesh: LogicalMesh,
    strategy: Strategy,
    op: Operator,
    types: Sequence[TensorType],
    *,
    halves: bool,
) -> float:
    # Operands have the shards of one step; over all steps a device meets all keys.
    times = math.prod(mesh.sizes[a] for a in (strategy.rings[0].axes if strategy.rings else ()))
    shapes = _shapes(mesh, strategy, types)
    if halves:
        times, shapes = units_of_halves(times), halved_shapes(op, shapes)
    moved, dtype = score_traffic_bytes(op, shapes, score_width(op)), product_dtype(op, types[0].dtype)
    if not cost.knows_kernels:
        return times * float(cost.operator_s(attention_flops(op, shapes), moved, dtype))
    backward = op.primitive != ATTENTION
    products = attention_products(op, shapes, item_bytes(types[0].dtype))
    each = sum(float(cost.product_s(p, dtype, "whole", backward=backward)) for p in products)
    return times * (each + float(cost.moved_s(moved, 1.0, "whole")))
