"""Arrays on the devices of several processes: placed without a message, read back where that is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from autopar._compat.dtypes import dtype_name, key_impl


def is_global(leaf: Any) -> bool:
    """Whether an array lies on devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def is_placed(leaf: Any) -> bool:
    """Whether an array of a world lies on devices of several processes, or of a stage inside one of them."""
    return is_global(leaf) or (
        jax.process_count() > 1 and isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    )


def own(leaf: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """A numpy array, or a number, in a buffer of its own: devices may read it after the caller has filled his again."""
    return np.array(leaf, dtype)


def copied(array: Any) -> Any:
    """A copy of an array that lies as it does, in buffers of its own; typed keys and numpy arrays are taken too."""
    if not isinstance(array, jax.Array):
        return np.array(array)
    if not array.sharding.addressable_devices:
        return array  # there is nothing of it here
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        return jax.random.wrap_key_data(jax.device_put(jnp.copy(data), data.sharding), impl=jax.random.key_impl(array))
    return jax.device_put(jnp.copy(array), array.sharding)


def empty(shape: Sequence[int], sharding: NamedSharding, dtype: Any) -> Any:
    """An array on devices of other processes, of which this one has nothing; typed keys too."""
    shape = tuple(shape)
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    more = (None,) * (len(data.shape) - len(sharding.spec))
    numbers = empty(data.shape, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *more)), data.dtype)
    return jax.random.wrap_key_data(numbers, impl=key_impl(dtype_name(dtype)))


def spread(leaf: Any, dtype: Any, wanted: NamedSharding, *, copy: bool = True) -> Any:
    """An array that every process has whole, of which each places what lies on its own devices.

    Args:
        leaf: numpy array, number, or jax array on devices of this process.
        dtype: of the result.
        wanted: where it is to lie, on devices of several processes.
        copy: whether its buffers must not be the caller's.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        more = (None,) * (data.ndim - leaf.ndim)
        spec = (*wanted.spec, *(None,) * (leaf.ndim - len(wanted.spec)), *more)
        placed = spread(data, data.dtype, NamedSharding(wanted.mesh, PartitionSpec(*spec)), copy=copy)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
    whole = own(leaf, dtype) if copy else np.asarray(leaf, dtype)
    return jax.make_array_from_callback(whole.shape, wanted, lambda index: whole[index], dtype=whole.dtype)


def put(array: Any, wanted: NamedSharding) -> Any:
    """``array`` where it is wanted; of several processes each places its part of what every one has whole."""
    if wanted.is_fully_addressable or is_global(array):
        return jax.device_put(array, wanted)
    return spread(array, array.dtype, wanted, copy=False)


def whole(array: Any) -> Any:
    """A numpy array, or an array of keys on this process, of all of a global array: all processes call it together."""
    if jax.process_count() == 1 or not isinstance(getattr(array, "sharding", None), NamedSharding):
        return array
    mesh = array.sharding.mesh
    if len(mesh.devices.flat) < jax.device_count():
        return _from_some(array)
    everywhere = NamedSharding(mesh, PartitionSpec())
    copied = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return copied.addressable_data(0)


def _from_some(array: Any) -> Any:
    """All of an array that lies on devices of some processes: those that have a part say what it is."""
    data = np.zeros(array.shape, array.dtype)
    count = np.zeros(array.shape, np.int32)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            data[shard.index] = np.asarray(shard.data)
            count[shard.index] = 1
    counts = np.asarray(multihost_utils.process_allgather(count))
    parts = np.asarray(multihost_utils.process_allgather(data))
    for part, there in zip(parts, counts, strict=True):
        data = np.where(there > 0, part, data)
    return data


def checksum(leaf: Any) -> str:
    """CRC-32 of what an array holds, as text; of an array on several processes its shape and dtype alone."""
    if is_placed(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(leaf)
    return f"{array.dtype}{list(array.shape)} with checksum {zlib.crc32(array.reshape(-1).view(np.uint8).data):08x}"
