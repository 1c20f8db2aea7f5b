"""Connections between CPU devices of several processes, opened when a step is loaded.

XLA opens them when a collective first needs them, and gives up after 30 seconds. A process that computes for longer
before its first message, or calls Python, would end the others. Accelerators open theirs themselves: what no program
needs would take their memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.world import world
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.transport.permutes import MovePrograms


def open_connections(meshes: Iterable[Mesh]) -> None:
    """Opens the connections of collectives along any axes of some meshes, once all processes of them have come.

    In a world of several processes devices of one process are connected by them too.

    Args:
        meshes: the same on all processes, in one order; perhaps all inside of this one.

    Raises:
        ProcessLostError: a process did not come.
    """
    processes = world()
    several = [m for m in dict.fromkeys(meshes) if m.size > 1 and m.devices.flat[0].platform == "cpu"]
    if processes is None or not several:
        return
    if any(m.is_multi_process for m in several):
        Agreement.next(processes, "the opening of connections").compare([])
    for mesh in several:
        if mesh.local_devices:
            _connect(mesh)


def compile_connected(programs: MovePrograms) -> None:
    """Compiles programs that were not compiled before, and opens their connections.

    Args:
        programs: the same on all processes, also those that this one has no devices of.
    """
    new = programs.compile()
    open_connections(program.mesh for program in new)


def _connect(mesh: Mesh) -> None:
    """Adds up a number of each device along each choice of axes."""
    axes = tuple(mesh.axis_names)
    choices = [c for n in range(1, len(axes) + 1) for c in itertools.combinations(axes, n)]

    def on_device(numbers: jax.Array) -> jax.Array:
        for choice in choices:
            numbers = lax.psum(numbers, choice)
        return numbers

    spec = PartitionSpec(axes)
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shards = [jax.device_put(np.zeros(1, np.int32), d) for d in mesh.local_devices]
    numbers = jax.make_array_from_single_device_arrays((mesh.size,), NamedSharding(mesh, spec), shards)
    with LAUNCHES.of(mapped):
        jax.block_until_ready(jax.jit(mapped)(numbers))
