"""Side effects of a step: which of them run, and the error for those that cannot."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster
from autopar.errors import ClusterError, TraceError
from autopar.ir import Graph, Operator
from autopar.ir.primitives import CALLBACKS
from autopar.runtime.ray.cluster import RayCluster


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


def check_callbacks(graph: Graph, cluster: Cluster | None) -> None:
    """Refuses callbacks into Python where workers run the step, before anything is planned.

    Those at the top of the step of which nothing is returned are left out of stages, and pass.

    Args:
        graph: a step.
        cluster: that will run it; None for the devices of this process.

    Raises:
        ClusterError: a callback that results need, on a cluster of workers; it has the user's line.
    """
    if not isinstance(cluster, RayCluster):
        return
    left_out = {op.id for op in graph.operators if not op.results}
    calls = [op for op in _operators(graph) if op.primitive in CALLBACKS and op.id not in left_out]
    if calls:
        raise ClusterError(
            f"{graph.name} calls Python {len(calls)} times ({calls[0].primitive}), "
            f"and {cluster.num_devices} devices of workers on Ray run it",
            cause="a callback, as those of autopar.transforms.on_disk, which reads and writes files of this process",
            remedy='cluster=Cluster.local(), or leave the callback out; in place of on_disk offload="auto" or '
            'offload="update" keeps moments in host memory of the workers',
            source=calls[0].source or None,
        )


def _operators(graph: Graph) -> Iterator[Operator]:
    for op in graph.operators:
        yield op
        for _, region in op.regions:
            yield from _operators(region)
