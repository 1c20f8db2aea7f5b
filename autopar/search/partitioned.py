"""Layouts of parameters of which replicas have a part each, as with ZeRO-3, and of the batch meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Layout
from autopar.search.origins import origins


@dataclass(frozen=True)
class PartitionedParameters:
    """Layouts of values where each device keeps a part of every parameter, and whole ones do not stay.

    A parameter is gathered by what reads it, and its copy ends with that (Rajbhandari et al., "ZeRO", 2020, section
    5.3). So what loops take of parameters is split, or whole copies of all layers would lie in memory, and so is what
    they carry and stack of gradients; what they stack of activations is split anyway, as the batch is. The devices do
    not share matrices: products of the batch with parameters have the batch split over them.

    Args:
        parts: mesh axes whose devices have parts of a parameter.
        replicas: those of them that share the batch.
        kept: keys of what loops and branches take of parameters, and of sums of gradients, see
            `autopar.search.origins.Origins`.
        products: by key of a product of the batch with parameters the dims that the batch brings.
    """

    parts: tuple[str, ...]
    replicas: tuple[str, ...]
    kept: Collection[str]
    products: Mapping[str, frozenset[int]]

    @staticmethod
    def of(graph: Graph, parts: tuple[str, ...], replicas: tuple[str, ...]) -> PartitionedParameters:
        """Finds the parameters of a train step, or of a stage of one."""
        labels_of = origins(graph)
        return PartitionedParameters(parts, replicas, labels_of.entering | labels_of.sums, labels_of.products)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        ok = [True] * len(layouts)
        if key in self.kept:
            for axis in self.parts:
                ok = _where(ok, [any(axis in split for split in k.dims) for k in layouts])
        elif brought := self.products.get(key):
            for axis in self.replicas:
                ok = _where(ok, [any(axis in k.dims[d] for d in brought) for k in layouts])
        return ok


def _where(ok: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
    """``ok`` where also wanted, if that leaves any."""
    both = [a and b for a, b in zip(ok, wanted, strict=True)]
    return both if any(both) else list(ok)
