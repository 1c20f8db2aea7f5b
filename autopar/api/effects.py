"""Side effects of a step: which of them run, and the error for those that cannot."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import TraceError
from autopar.ir import Graph, Operator


def check_effects(graph: Graph) -> None:
    """Refuses what cannot run: effects in program order, which XLA keeps on one device.

    Raises:
        TraceError: an ordered callback or print; it has the user's line.
    """
    for op in _operators(graph):
        ordered = [e for e in op.effects if e.startswith("Ordered")]
        if ordered:
            raise TraceError(
                f"{graph.name} has an ordered {op.primitive}",
                cause="XLA keeps the order of callbacks on one device only",
                remedy="leave out ordered=True, or return the value and print it outside of the step",
                source=op.source or None,
            )


def _operators(graph: Graph) -> Iterator[Operator]:
    for op in graph.operators:
        yield op
        for _, region in op.regions:
            yield from _operators(region)
