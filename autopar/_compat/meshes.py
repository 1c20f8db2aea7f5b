"""Meshes and `PartitionSpec`, made without importing jax before somebody asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def device_mesh(axes: Sequence[tuple[str, int]], devices: Sequence[Any]) -> Any:
    """The `Mesh` of ``devices`` with named axes of these sizes, in row-major order."""
    sharding, numpy = import_module("jax.sharding"), import_module("numpy")
    grid = numpy.array(devices, dtype=object).reshape([n for _, n in axes])
    names = tuple(name for name, _ in axes)
    return sharding.Mesh(grid, names, axis_types=(sharding.AxisType.Auto,) * len(names))


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> Any:
    """The `AbstractMesh` with named axes of these sizes: for programs whose devices are elsewhere."""
    sharding = import_module("jax.sharding")
    names, sizes = tuple(name for name, _ in axes), tuple(n for _, n in axes)
    return sharding.AbstractMesh(sizes, names, (sharding.AxisType.Auto,) * len(axes))


def local_devices() -> Sequence[Any]:
    """All devices that jax sees."""
    devices: Sequence[Any] = import_module("jax").devices()
    return devices


def partition_spec(dims: Sequence[tuple[str, ...]]) -> Any:
    """The `PartitionSpec` of a tensor whose dims are split by these mesh axes."""
    spec = import_module("jax.sharding").PartitionSpec
    entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return spec(*entries)
