"""Attention in blocks as the planner prices it: seconds, memory, and whether scores that a mask leaves empty are made.

On one device leaving them out costs nothing. On a ring tokens are dealt out in halves and brought home again, so that
devices do the same work (`autopar.lower.localize.attention`): done where the products that are left out take longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class AttentionSite:
    """An operator with one of its strategies, as attention in blocks is priced.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        strategy: of the operator.
        op: any operator where `skips_masked` is asked, else one of attention.
        types: of its operands.
    """

    cost: CostModel
    mesh: LogicalMesh
    strategy: Strategy
    op: Operator
    types: Sequence[TensorType]

    @cached_property
    def skips_masked(self) -> bool:
        """Whether scores that a mask leaves empty are left out: where they can be, and that is faster."""
        if self.op.primitive not in ATTENTIONS or not AttentionSpec.of(self.op).has_halves(self._shapes):
            return False
        rings = self.strategy.rings
        if not rings:
            return True
        messages = [b for _, b in self.dealt()]
        sent_s = sum(self.cost.collective_s("collective-permute", b, rings[0].axes, self.mesh) for b in messages)
        whole_s, left_s = (self._busy_s(halves) for halves in (False, True))
        return left_s + float(sent_s) < whole_s

    def dealt(self) -> Iterator[tuple[int, int]]:
        """Messages of causal ring attention that deal tokens out in another order, so that devices have as much work.

        (operand, bytes) of each message; a message of a result has the first operand.
        """
        op, strategy, sizes = self.op, self.strategy, self.mesh.sizes
        spec, seen = AttentionSpec.of(op), set[object]()
        for n, labels in enumerate(spec.operands):
            if op.operands[n] in seen or (op.primitive == BACKWARD and n == 3):
                continue
            if n in (1, 2) or spec.rows in labels:
                seen.add(op.operands[n])
                yield from [(n, self._operand_bytes(n) // 2)] * 2
        if op.primitive == BACKWARD:  # of each row the sum of the result times its gradient
            yield from [(0, self._operand_bytes(4) // 2)] * 2
        for layout, v in zip(strategy.result_layouts, op.results, strict=True):
            yield from [(0, layout.local_bytes(v.type, sizes) // 2)] * 2

    @property
    def seconds(self) -> float:
        """Seconds on one device: of its products, and of the scores that they write and read."""
        return self._busy_s(self.skips_masked)

    @property
    def workspace_bytes(self) -> int:
        """Bytes a device that are needed while it runs."""
        strategy, sizes, shapes = self.strategy, self.mesh.sizes, self._shapes
        layouts = zip(strategy.result_layouts, self.op.results, strict=True)
        results = [k.local_shape(v.type.shape, sizes) for k, v in layouts]
        more = sum(map(self._operand_bytes, {r.operand for r in strategy.rings}))
        if self.skips_masked:
            shapes = halved_shapes(self.op, shapes)
            more += sum(map(self._operand_bytes, {n for n, _ in self.dealt()} if strategy.rings else ()))
        return workspace_bytes(self.op, shapes, results) + more

    def _operand_bytes(self, operand: int) -> int:
        return self.strategy.operand_layouts[operand].local_bytes(self.types[operand], self.mesh.sizes)

    @property
    def _shapes(self) -> Shapes:
        layouts = zip(self.strategy.operand_layouts, self.types, strict=True)
        return [k.local_shape(t.shape, self.mesh.sizes) for k, t in layouts]

    def _busy_s(self, halves: bool) -> float:
        # Operands have the shards of one step; over all steps a device meets all keys.
        op, cost, rings = self.op, self.cost, self.strategy.rings
        times = math.prod(self.mesh.sizes[a] for a in (rings[0].axes if rings else ()))
        shapes = self._shapes
        if halves:
            times, shapes = units_of_halves(times), halved_shapes(op, shapes)
        moved, dtype = score_traffic_bytes(op, shapes, score_width(op)), product_dtype(op, self.types[0].dtype)
        if not cost.knows_kernels:
            return times * float(cost.operator_s(attention_flops(op, shapes), moved, dtype))
        backward = op.primitive != ATTENTION
        products = attention_products(op, shapes, item_bytes(self.types[0].dtype))
        each = sum(float(cost.product_s(p, dtype, "whole", backward=backward)) for p in products)
        return times * (each + float(cost.moved_s(moved, 1.0, "whole")))
