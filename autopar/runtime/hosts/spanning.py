"""Arrays on devices of some processes, as Orbax wants them: on devices of all.

Orbax calls an array that lies on one process's devices that process's own, and refuses to write it next to those of
others. A stage of a pipeline that lies inside one process has such arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.hosts.arrays import spread, whole


def spans(sharding: Any) -> bool:
    """Whether a sharding has devices of all processes, or is none on a mesh."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return True
    devices: Any = sharding.device_set
    return len({int(d.process_index) for d in devices}) == int(jax.process_count())


def everywhere(shape: tuple[int, ...]) -> NamedSharding:
    """A sharding over all devices: of the first dim where they divide it, else of nothing."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    split = bool(shape) and shape[0] > 0 and shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec("devices") if split else PartitionSpec())


def spanning(leaf: Any) -> Any:
    """``leaf`` on devices of all processes, which call this together; what lies so already as it is."""
    if not isinstance(leaf, jax.Array) or spans(leaf.sharding):
        return leaf
    return spread(whole(leaf), leaf.dtype, everywhere(leaf.shape), copy=False)


def onto(array: Any, wanted: NamedSharding) -> Any:
    """An array on devices of all processes where it is wanted, on devices of some."""
    return spread(whole(array), array.dtype, wanted, copy=True) if array.sharding != wanted else array
