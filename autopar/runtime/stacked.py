"""Leaves that hold the layers of several stages: one array for the user, one on each stage for the pipeline.

Where all stages hold equally many layers on meshes of one shape in one layout, the user's array is split over stages
along its first dim, and its parts are the stages' own arrays: nothing is copied. Elsewhere parts are cut and joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.lower.hosted import PINNED_HOST

_STAGES = "stages"


@dataclass(frozen=True, eq=False)
class StackedLeaf:
    """A leaf in pieces along its first dim.

    Args:
        places: sharding of each piece, in order; pieces of one stage follow each other.
    """

    places: tuple[NamedSharding, ...]

    @property
    def runs(self) -> list[tuple[NamedSharding, int]]:
        """(sharding, number of pieces) of consecutive pieces in one place."""
        runs: list[tuple[NamedSharding, int]] = []
        for place in self.places:
            if runs and runs[-1][0] == place:
                runs[-1] = (place, runs[-1][1] + 1)
            else:
                runs.append((place, 1))
        return runs

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the whole leaf."""
        runs = self.runs
        if len(runs) == 1:
            return runs[0][0]
        first = runs[0][0]
        same_shards = all(
            n == runs[0][1] and _lies(s) == _lies(first) and dict(s.mesh.shape) == dict(first.mesh.shape)
            for s, n in runs
        )
        disjoint = len({d for s, _ in runs for d in s.mesh.devices.flat}) == sum(s.mesh.size for s, _ in runs)
        if not same_shards or not disjoint:
            return first
        grid = np.stack([s.mesh.devices for s, _ in runs])
        mesh = Mesh(grid, (_STAGES, *first.mesh.axis_names), axis_types=(AxisType.Auto,) * grid.ndim)
        spec = PartitionSpec((_STAGES, *_axes(first.spec)), *first.spec[1:])
        return NamedSharding(mesh, spec, memory_kind=first.memory_kind)

    @property
    def is_direct(self) -> bool:
        """Whether the whole leaf is made of the stages' arrays."""
        return len(self.runs) > 1 and _STAGES in self.sharding.mesh.axis_names

    def split(self, array: Any) -> list[Any]:
        """The pieces of a whole leaf that lies in `sharding`; of places in other processes arrays without data."""
        if self.is_direct:
            parts = []
            for place, count in self.runs:
                mesh_devices = set(place.mesh.devices.flat)
                shape = (array.shape[0] // len(self.runs), *array.shape[1:])
                shards = [s.data for s in array.addressable_shards if s.device in mesh_devices]
                part = jax.make_array_from_single_device_arrays(shape, place, shards, dtype=array.dtype)
                parts += [part] if count == 1 else [_put(p, place) for p in _cut(part, count)]
            return parts
        return [_put(p, s) for p, s in zip(_cut(array, len(self.places)), self.places, strict=True)]

    def join(self, leaf_shards: Sequence[Any]) -> Any:
        """The whole leaf in `sharding`, of pieces each of which lies in its place; see `split`."""
        parts, at = [], 0
        for place, count in self.runs:
            some = [_put(p, place) for p in leaf_shards[at : at + count]]
            parts.append(some[0] if count == 1 else _put(_joined(some), place))
            at += count
        if len(parts) == 1:
            return parts[0]
        target = self.sharding
        if self.is_direct:
            shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            shards = [s.data for p in parts for s in p.addressable_shards]
            return jax.make_array_from_single_device_arrays(shape, target, shards, dtype=parts[0].dtype)
        return _put(_joined([_put(p, target) for p in parts]), target)


def _put(array: Any, place: NamedSharding) -> Any:
    """An array in its place; one that lies on other processes' devices has no data to move, and lies there already."""
    if not place.addressable_devices:
        return jax.make_array_from_single_device_arrays(array.shape, place, [], dtype=array.dtype)
    return jax.device_put(array, place)


def _axes(spec: PartitionSpec) -> tuple[Any, ...]:
    """Mesh axes that split the first dim."""
    if not len(spec) or spec[0] is None:
        return ()
    return spec[0] if isinstance(spec[0], tuple) else (spec[0],)


def _lies(sharding: NamedSharding) -> tuple[PartitionSpec, str | None]:
    """Split of a piece, and the kind of memory that it is in."""
    return sharding.spec, sharding.memory_kind


def _is_on_host(array: Any) -> bool:
    return str(array.sharding.memory_kind) == PINNED_HOST


def _joined(some: Sequence[Any]) -> Any:
    """Pieces of a leaf as one array: hosts join what they have, so that devices need no room for it."""
    if not some[0].sharding.addressable_devices:
        return _without_data(some[0], (sum(p.shape[0] for p in some), *some[0].shape[1:]))
    if any(map(_is_on_host, some)):
        return np.concatenate([np.asarray(p) for p in some])
    return jnp.concatenate(some)


def _cut(array: Any, count: int) -> list[Any]:
    size = array.shape[0] // count
    if not array.sharding.addressable_devices:
        return [_without_data(array, (size, *array.shape[1:]))] * count
    if _is_on_host(array):
        whole = np.asarray(array)
        return [whole[k * size : (k + 1) * size] for k in range(count)]
    return [lax.slice_in_dim(array, k * size, (k + 1) * size) for k in range(count)]


def _without_data(array: Any, shape: tuple[int, ...]) -> Any:
    """An array of another length, without data, on other processes' devices."""
    return jax.make_array_from_single_device_arrays(shape, array.sharding, [], dtype=array.dtype)
