"""Messages of operators to neighbours during their run, edges of shards and whole pieces: bytes, and seconds.

Edges that one operator had from neighbours serve those who read the same value later, in the same layout and over the
same windows, as the gradient of a kernel after the convolution: XLA sends what is the same once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Layout, Literal, Operator, TensorType
from autopar.search.intra.attention import AttentionSite
from autopar.search.intra.builder import Builder
from autopar.search.intra.sharding_problem import SiteDraft
from autopar.sharding import Strategy
from autopar.sharding.halo import HaloExchange, messages

#: Layout of an operand and the edges of its shards that come from neighbours; None where none come.
Exchanged: TypeAlias = tuple[Layout, tuple[HaloExchange, ...]] | None


@dataclass(frozen=True, slots=True)
class NeighbourMessage:
    """One message to a neighbour.

    Args:
        operand: index of the operand whose edge or piece it is.
        bytes: that one device sends.
        axes: mesh axes along which the neighbours lie.
        seconds: of the message, with `CostModel.refill_s` where it follows work.
    """

    operand: int
    bytes: int
    axes: tuple[str, ...]
    seconds: float


def edges(
    cost: CostModel,
    mesh: LogicalMesh,
    strategy: Strategy,
    op: Operator,
    types: Sequence[TensorType],
    there: Collection[int] = (),
) -> Iterator[NeighbourMessage]:
    """Messages between neighbours (halo exchange) of one run of an operator, as of a convolution split along an image.

    Args:
        cost: what things cost.
        mesh: the logical mesh.
        strategy: of the operator.
        op: the operator.
        types: of its operands.
        there: operands whose halos an earlier operator has received.
    """
    for operand in sorted({e.operand for e in strategy.exchanges}.difference(there)):
        type = types[operand]
        shape = strategy.operand_layouts[operand].local_shape(type.shape, mesh.sizes)
        more_s = float(cost.refill_s(strategy.operand_layouts[operand].local_bytes(type, mesh.sizes)))
        for elements, axes in messages(strategy.exchanges, operand, shape):
            bytes = elements * type.nbytes // max(1, type.size)  # no element where there is none to send
            seconds = cost.collective_s("collective-permute", bytes, axes, mesh)
            yield NeighbourMessage(operand, bytes, axes, seconds + more_s if bytes else seconds)
            more_s = 0.0 if bytes else more_s
    for ring in strategy.rings:
        type, layout = types[ring.operand], strategy.operand_layouts[ring.operand]
        bytes = layout.local_bytes(type, mesh.sizes)
        more_s = float(cost.refill_s(bytes))
        bytes = bytes if not ring.width else bytes * type.size // type.nbytes * ring.width
        seconds = cost.collective_s("collective-permute", bytes, ring.axes, mesh) + more_s
        yield from (NeighbourMessage(ring.operand, bytes, ring.axes, seconds) for _ in range(ring.count))
    site = AttentionSite(cost, mesh, strategy, op, types)
    if strategy.rings and site.skips_masked:
        axes = strategy.rings[0].axes
        for operand, bytes in site.dealt():
            yield NeighbourMessage(operand, bytes, axes, cost.collective_s("collective-permute", bytes, axes, mesh))


def exchanged(strategy: Strategy, operand: int) -> Exchanged:
    """Pieces of an operand from neighbours under a strategy; None also where something goes back to them."""
    of_operand = tuple(replace(e, operand=0) for e in strategy.exchanges if e.operand == operand)
    if not of_operand or any(e.returns for e in of_operand):
        return None
    return strategy.operand_layouts[operand], of_operand


class SharedEdges:
    """For each value the operator that received its halos first, which later operators read too.

    Where the forward and the backward pass share nothing there is one for each pass.
    """

    def __init__(self) -> None:
        self.first: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, b: Builder, site: SiteDraft, prefix: str) -> SiteDraft:
        """Adds the seconds of an operator's messages to its node, and to the edge to who had the same edges first.

        Args:
            b: where they are added.
            site: the operator, which will be the next site.
            prefix: names of the enclosing regions.

        Returns:
            The site, with who had its edges first.
        """
        shared: dict[int, tuple[int, int]] = {}
        for operand, name in enumerate(site.op.operands):
            if isinstance(name, Literal) or not any(exchanged(s, operand) for s in site.strategies):
                continue
            first = self.first.setdefault(
                (prefix + name, site.phase if b.split_phases else ""), (len(b.sites), operand)
            )
            if first[0] < len(b.sites):
                shared[operand] = first
        sent = [list(edges(b.cost, b.mesh, s, site.op, site.types)) for s in site.strategies]
        own_s = [sum(m.seconds for m in messages if m.operand not in shared) for messages in sent]
        b.nodes[site.node].costs = b.nodes[site.node].costs + site.weight * np.array(own_s, float)
        for operand, (earlier, of_operand) in shared.items():
            seconds = np.array([sum(m.seconds for m in messages if m.operand == operand) for messages in sent], float)
            before = [exchanged(s, of_operand) for s in b.sites[earlier].strategies]
            after = [exchanged(s, operand) for s in site.strategies]
            same = np.array([[x is not None and x == y for y in after] for x in before])
            b.edge(b.sites[earlier].node, site.node, np.where(same, 0.0, site.weight * seconds))
        return replace(site, shared=tuple((operand, *first) for operand, first in shared.items()))


def there_already(sites: Sequence[SiteDraft], site: SiteDraft, choice: Sequence[int]) -> frozenset[int]:
    """Operands of an operator whose halos an earlier operator has received from neighbours.

    Args:
        sites: of all operators.
        site: of the operator.
        choice: strategy of each node.
    """

    def of(s: SiteDraft, operand: int) -> Exchanged:
        return exchanged(s.strategies[choice[s.node]], operand)

    pairs = ((operand, of(site, operand), of(sites[earlier], first)) for operand, earlier, first in site.shared)
    return frozenset(operand for operand, mine, before in pairs if mine is not None and mine == before)
