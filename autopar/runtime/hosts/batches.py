"""Batches of which each process has the examples that its own devices need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.runtime.hosts.arrays import empty


def own_rows(shape: Sequence[int], wanted: NamedSharding) -> tuple[int, ...]:
    """Indices of the first dim of an array of which this process's devices have a part, rising."""
    rows: set[int] = set()
    for index in wanted.addressable_devices_indices_map(tuple(shape)).values():
        assert index is not None
        rows.update(range(*index[0].indices(shape[0])))
    return tuple(sorted(rows))


def shared_rows(shape: Sequence[int], wanted: NamedSharding) -> tuple[int, ...]:
    """Indices of the first dim of an array of which other processes have a part that this process has too, rising."""
    rows_here = set(own_rows(shape, wanted))
    here = wanted.addressable_devices
    rows_elsewhere: set[int] = set()
    for device, index in wanted.devices_indices_map(tuple(shape)).items():
        if device not in here:
            assert index is not None
            rows_elsewhere.update(range(*index[0].indices(shape[0])))
    return tuple(sorted(rows_here & rows_elsewhere))


def from_rows(local: Any, rows: Sequence[int], shape: Sequence[int], wanted: NamedSharding) -> Any:
    """The global array of which every process has some rows.

    Args:
        local: rows of this process, whole in all other dims.
        rows: their indices in the first dim, rising; all that its devices have a part of, perhaps more.
        shape: of the global array.
        wanted: where it is to lie.
    """
    array = np.asarray(local)
    if not wanted.addressable_devices:
        return empty(shape, wanted, array.dtype)
    at = {row: n for n, row in enumerate(rows)}

    def part(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        first, *rest = index
        rows_wanted = range(*first.indices(shape[0]))
        # Rows of one shard follow each other, and so do those that this process has of them.
        begin = at[rows_wanted[0]] if rows_wanted else 0
        return array[(slice(begin, begin + len(rows_wanted)), *rest)]

    return jax.make_array_from_callback(tuple(shape), wanted, part, dtype=array.dtype)
