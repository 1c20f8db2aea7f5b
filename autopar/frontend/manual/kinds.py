"""Collectives of ``jax.lax`` as computations on the pieces of all devices at once.

The pieces of a value lie in one array with a leading dim for each mesh axis that the collective goes over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import jax.numpy as jnp
import numpy as np
from jax import lax

_REDUCE: MappingProxyType[str, Callable[..., Any]] = MappingProxyType({"max": jnp.max, "min": jnp.min})


@dataclass(frozen=True)
class ManualCollective(ABC):
    """A collective over some axes of a mesh.

    Args:
        axes: names of the mesh axes, the slowest first.
        sizes: their sizes.
        groups: numbers of the devices that work together, where not all do.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def varies(self) -> bool:
        """Whether devices can get different results."""
        return self.groups is not None or self._varies

    @property
    @abstractmethod
    def _varies(self) -> bool:
        """`varies` where all devices work together."""

    @abstractmethod
    def _together(self, shards: Any) -> Any:
        """The result of devices that all work together: with a leading dim of devices where it varies.

        Args:
            shards: with one leading dim of devices.
        """

    def apply(self, shards: Any) -> Any:
        """The result: with a leading dim for each axis where it varies, else without any.

        Args:
            shards: with a leading dim for each axis, in order.
        """
        shape = shards.shape[len(self.axes) :]
        flat = lax.reshape(shards, (math.prod(self.sizes), *shape)) if len(self.axes) != 1 else shards
        if self.groups is None:
            result = self._together(flat)
            return self._unflat(result) if self._varies else result
        parts = []
        for group in self.groups:
            output = replace(self, sizes=(len(group),), groups=None)._together(flat[np.array(group)])
            parts.append(output if self._varies else jnp.broadcast_to(output, (len(group), *output.shape)))
        order = np.argsort(np.concatenate([np.array(g) for g in self.groups]))
        return self._unflat(jnp.concatenate(parts)[order])

    def _unflat(self, flat: Any) -> Any:
        return lax.reshape(flat, (*self.sizes, *flat.shape[1:])) if len(self.axes) != 1 else flat


@final
@dataclass(frozen=True)
class Reduce(ManualCollective):
    """``psum``, ``pmax``, ``pmin``; ``op`` is the last part of the name."""

    op: str = "sum"

    @property
    def _varies(self) -> bool:
        return False

    def _together(self, shards: Any) -> Any:
        if self.op == "sum":
            return jnp.sum(shards, 0, dtype=shards.dtype)
        return _REDUCE[self.op](shards, 0)


@final
@dataclass(frozen=True)
class Gather(ManualCollective):
    """``all_gather``: pieces side by side along ``dim``, or ``stacked`` along a new one."""

    dim: int = 0
    stacked: bool = True

    @property
    def _varies(self) -> bool:
        return False

    def _together(self, shards: Any) -> Any:
        moved = jnp.moveaxis(shards, 0, self.dim)
        return moved if self.stacked else _merged(moved, self.dim)


@final
@dataclass(frozen=True)
class ReduceScatter(ManualCollective):
    """``psum_scatter``: each device gets a piece of the sum along ``dim``; with ``stacked`` that dim goes away."""

    dim: int = 0
    stacked: bool = True

    @property
    def _varies(self) -> bool:
        return True

    def _together(self, shards: Any) -> Any:
        total = jnp.sum(shards, 0, dtype=shards.dtype)
        split = total if self.stacked else _split(total, self.dim, shards.shape[0])
        return jnp.moveaxis(split, self.dim, 0)


@final
@dataclass(frozen=True)
class AllToAll(ManualCollective):
    """``all_to_all``: the piece of ``split`` with a device's number goes to it; what comes lies along ``concat``."""

    split: int = 0
    concat: int = 0

    @property
    def _varies(self) -> bool:
        return True

    def _together(self, shards: Any) -> Any:
        parts = _split(shards, self.split + 1, shards.shape[0])  # [from, ..., to, ...]
        sent = jnp.moveaxis(parts, self.split + 1, 0)  # [to, from, ...]
        return _merged(jnp.moveaxis(sent, 1, self.concat + 1), self.concat + 1)


@final
@dataclass(frozen=True)
class ManualPermute(ManualCollective):
    """``ppermute``; ``pairs`` are (from, to). Devices to which nothing is sent get zeros."""

    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def _varies(self) -> bool:
        return True

    def _together(self, shards: Any) -> Any:
        count = shards.shape[0]
        source = {to: start for start, to in self.pairs}
        shift = source.get(0, 0) % count
        if all(source.get(to) == (to + shift) % count for to in range(count)):
            return jnp.roll(shards, -shift, 0)
        taken = shards[np.array([source.get(to, 0) for to in range(count)])]
        gets = np.array([to in source for to in range(count)]).reshape(count, *[1] * (shards.ndim - 1))
        return taken if gets.all() else jnp.where(gets, taken, jnp.zeros_like(taken))


@final
@dataclass(frozen=True)
class Broadcast(ManualCollective):
    """``pbroadcast``: all devices get the piece of ``source``."""

    source: int = 0

    @property
    def _varies(self) -> bool:
        return False

    def _together(self, shards: Any) -> Any:
        return shards[self.source]


@final
@dataclass(frozen=True)
class Index(ManualCollective):
    """``axis_index``: each device's number; the operand is any number."""

    @property
    def _varies(self) -> bool:
        return True

    def _together(self, shards: Any) -> Any:
        return lax.iota(np.int32, shards.shape[0])


def _split(array: Any, dim: int, count: int) -> Any:
    """``dim`` taken apart into (count, rest)."""
    shape = array.shape
    return lax.reshape(array, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))


def _merged(array: Any, dim: int) -> Any:
    """``dim`` and the one after it as one dim."""
    shape = array.shape
    return lax.reshape(array, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
