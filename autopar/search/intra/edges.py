"""What operators send to neighbours while they run, edges of shards and whole pieces: bytes, and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Operator, TensorType
from autopar.search.intra.attention import dealt, skips_masked
from autopar.search.intra.draft import Array
from autopar.sharding import Strategy
from autopar.sharding.halo import messages


@dataclass(frozen=True, slots=True)
class NeighbourMessage:
    """One message to a neighbour.

    Args:
        operand: index of the operand whose edge or piece it is.
        bytes: that one device sends.
        axes: mesh axes along which the neighbours lie.
        seconds: of the message.
    """

    operand: int
    bytes: int
    axes: tuple[str, ...]
    seconds: float


def edges(
    cost: CostModel, mesh: LogicalMesh, strategy: Strategy, op: Operator, types: Sequence[TensorType]
) -> Iterator[NeighbourMessage]:
    """The messages of one run of an operator.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        strategy: of the operator.
        op: the operator.
        types: of its operands.
    """
    for operand in sorted({e.operand for e in strategy.exchanges}):
        type = types[operand]
        shape = strategy.operand_layouts[operand].local_shape(type.shape, mesh.sizes)
        for elements, axes in messages(strategy.exchanges, operand, shape):
            bytes = elements * type.nbytes // type.size
            yield NeighbourMessage(operand, bytes, axes, cost.collective_s("collective-permute", bytes, axes, mesh))
    for ring in strategy.rings:
        type, layout = types[ring.operand], strategy.operand_layouts[ring.operand]
        bytes = layout.local_bytes(type, mesh.sizes)
        bytes = bytes if not ring.width else bytes * type.size // type.nbytes * ring.width
        seconds = cost.collective_s("collective-permute", bytes, ring.axes, mesh)
        yield from (NeighbourMessage(ring.operand, bytes, ring.axes, seconds) for _ in range(ring.count))
    if strategy.rings and skips_masked(cost, mesh, strategy, op, types):
        axes = strategy.rings[0].axes
        for operand, bytes in dealt(mesh, strategy, op, types):
            yield NeighbourMessage(operand, bytes, axes, cost.collective_s("collective-permute", bytes, axes, mesh))


def edges_s(
    cost: CostModel, mesh: LogicalMesh, strategies: Sequence[Strategy], op: Operator, types: Sequence[TensorType]
) -> Array | float:
    """Seconds of the messages of one run of an operator, by strategy; 0.0 where none sends anything."""
    if not any(s.exchanges or s.rings for s in strategies):
        return 0.0
    return np.array([sum(e.seconds for e in edges(cost, mesh, s, op, types)) for s in strategies], float)
