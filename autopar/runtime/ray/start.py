"""The way in: decides whether Ray is started here, before it is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.runtime.ray.cluster import RayCluster

#: Ray reads it when it is imported: "0" gives this machine the loopback address, on which all its servers listen.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def ray_cluster(address: str | None = None, **options: Any) -> RayCluster:
    """See `autopar.Cluster.ray`."""
    where = address or os.environ.get("RAY_ADDRESS")
    if where is None and "ray" not in sys.modules:
        os.environ.setdefault(_ONE_MACHINE, "0")
    cluster: RayCluster = import_module("autopar.runtime.ray.connect").connect(where, **options)
    return cluster
