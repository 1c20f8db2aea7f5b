"""Small results that are no state, as losses: every process gets what one worker has of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar._compat.dtypes import bytes_of, from_bytes, jax_dtype
from autopar._compat.meshes import device_mesh
from autopar.ir import TensorType
from autopar.runtime.transport.permutes import wait_on_cpus
from autopar.runtime.transport.tiles import moved

_ALL = "all"
_WORD = 4


@dataclass(frozen=True)
class BroadcastResult:
    """A small result that every process gets from the devices that computed it.

    Args:
        number: index among the outputs of the step.
        type: shape and dtype.
        lies: sharding on the devices that computed it.
    """

    number: int
    type: TensorType
    lies: NamedSharding


class Broadcast:
    """Gives all processes the small results of a step: one sum over their devices of words that one device has.

    Args:
        results: in the order of their numbers.
        devices: of all processes.
    """

    def __init__(self, results: Sequence[BroadcastResult], devices: Sequence[Any]) -> None:
        self._results = tuple(results)
        self.mesh = device_mesh([(_ALL, len(devices))], devices)
        self._place = {d: n for n, d in enumerate(devices)}
        self._nothing: dict[Any, Any] = {}
        sizes = [-(-_bytes(r.type) // _WORD) for r in self._results]
        ends = np.cumsum([0, *sizes]).tolist()
        self._spans = list(itertools.pairwise(ends))
        self._words = int(ends[-1])

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the results: on all devices of all processes."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of these outputs."""
        return frozenset(r.number for r in self._results)

    def compile(self) -> None:
        """Compiles the program."""
        if self._words:
            _ = self._executable

    def tell(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        """The results on all devices, by number; all processes call it together.

        Args:
            outputs: by number what this process has of them.
        """
        if not self._words:
            return {}
        shards = []
        by_device: dict[Any, list[tuple[int, Any]]] = {}
        for at, r in enumerate(self._results):
            if r.lies.addressable_devices:
                whole = moved(outputs[r.number], NamedSharding(r.lies.mesh, PartitionSpec()))
                first = min(r.lies.device_set, key=self._place.__getitem__)
                for shard in whole.addressable_shards:
                    if shard.device == first:
                        by_device.setdefault(shard.device, []).append((at, shard.data))
        for device in self.mesh.local_devices:
            mine = by_device.get(device)
            if mine is None:
                shards.append(self._silence(device))
            else:
                spans = tuple(self._spans[at] for at, _ in mine)
                shards.append(_packed(spans, self._words, [x for _, x in mine]))
        shape = (self._words * self.mesh.size,)
        given = NamedSharding(self.mesh, PartitionSpec(_ALL))
        words = jax.make_array_from_single_device_arrays(shape, given, shards)
        results = self._executable(words)
        wait_on_cpus(results, self.mesh)
        return {r.number: array for r, array in zip(self._results, results, strict=True)}

    def _silence(self, device: Any) -> Any:
        if device not in self._nothing:
            self._nothing[device] = jax.device_put(np.zeros(self._words, np.uint32), device)
        return self._nothing[device]

    @cached_property
    def _executable(self) -> Any:
        def on_device(words: Any) -> list[Any]:
            total = lax.psum(words, _ALL)
            return [_unpacked(total[a:b], r.type) for (a, b), r in zip(self._spans, self._results, strict=True)]

        mapped = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=PartitionSpec(_ALL), out_specs=PartitionSpec(), check_vma=False
        )
        given = jax.ShapeDtypeStruct(
            (self._words * self.mesh.size,), np.uint32, sharding=NamedSharding(self.mesh, PartitionSpec(_ALL))
        )
        return jax.jit(mapped).lower(given).compile()


def _bytes(type: TensorType) -> int:
    return int(np.prod(type.shape, dtype=np.int64)) * int(jax_dtype(type.dtype).itemsize)


def _pack(spans: tuple[tuple[int, int], ...], words: int, arrays: Sequence[Any]) -> Any:
    """The words of some results at their places, zeros elsewhere."""
    whole = jnp.zeros(words, jnp.uint32)
    for (first, end), x in zip(spans, arrays, strict=True):
        data = bytes_of(x)
        padded = jnp.pad(data, (0, (end - first) * _WORD - data.shape[0])).reshape(-1, _WORD)
        whole = whole.at[first:end].set(lax.bitcast_convert_type(padded, jnp.uint32))
    return whole


_packed = jax.jit(_pack, static_argnums=(0, 1))


def _unpacked(words: Any, type: TensorType) -> Any:
    data = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: _bytes(type)]
    return from_bytes(data, jax.ShapeDtypeStruct(type.shape, jax_dtype(type.dtype)))
