"""`PartitionSpec`, made without importing jax before somebody asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def partition_spec(dims: Sequence[tuple[str, ...]]) -> Any:
    """The `PartitionSpec` of a tensor whose dims are split by these mesh axes."""
    spec = import_module("jax.sharding").PartitionSpec
    entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return spec(*entries)
