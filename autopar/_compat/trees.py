"""Pytrees of `PartitionSpec`, made without importing jax before somebody asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from autopar.ir import Layout


def partition_spec(layout: Layout) -> Any:
    """The `PartitionSpec` of a layout that is not partial."""
    spec = import_module("jax.sharding").PartitionSpec
    entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in layout.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return spec(*entries)


def partition_specs(leaves: Sequence[tuple[str, str]], tree: Any) -> Any:
    """Specs of (path, layout text) leaves in the structure ``tree``, or by path where it is None."""
    specs = [partition_spec(Layout.parse(text)) for _, text in leaves]
    if tree is None:
        return {path: spec for (path, _), spec in zip(leaves, specs, strict=True)}
    return tree(specs)
