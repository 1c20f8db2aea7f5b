"""The resharding paths that planning prices, and that lowering then emits."""

from __future__ import annotations

import math

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.sharding.reshard import PathTables


def path_tables(mesh: LogicalMesh, cost: CostModel) -> PathTables:
    """The resharding paths on ``mesh`` under ``cost``; planning, records and lowering all use these.

    On a torus gathers and scatters go along one axis after the other, the innermost first: of one along several
    axes at once XLA's compiler for TPU makes an all-reduce, which sends twice the bytes.
    """
    torus = any(group.intra.torus_dims > 1 for group in cost.cluster.groups)

    def collective(kind: str, full_bytes: float, axes: tuple[str, ...]) -> float:
        if torus and len(axes) > 1 and kind in ("all-gather", "reduce-scatter"):
            return math.inf
        return cost.collective_s(kind, full_bytes, axes, mesh)

    def rearrange(bytes: float) -> float:
        return cost.operator_s(0.0, 2 * bytes, "f32")

    return PathTables(mesh, collective, rearrange=rearrange)
