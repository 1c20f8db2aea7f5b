"""Connects `autopar.Cluster.ray` to Ray, which is imported only here, when it is first called.

`ray_cluster` is the place to start. Starting workers is up to `autopar.runtime.ray.connect`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autopar.cluster.ray_options import RayOptions
from autopar.errors import ClusterError
from autopar.errors.base import optional_module

if TYPE_CHECKING:
    from autopar.runtime.ray.cluster import RayCluster


def ray_cluster(address: str | None, options: RayOptions) -> RayCluster:
    """The cluster of `autopar.Cluster.ray`.

    Args:
        address: of a running Ray cluster, or None.
        options: how workers are started and used.

    Raises:
        ClusterError: ray is not installed, does not start, or has too few machines.
    """
    where = address or os.environ.get("RAY_ADDRESS")
    missing = ClusterError(
        "Ray cannot be imported, and workers are processes of Ray",
        cause="it is not installed for this Python",
        remedy="pip install ray",
    )
    cluster: RayCluster = optional_module("autopar.runtime.ray.connect", "ray", missing).connect(where, options)
    return cluster
