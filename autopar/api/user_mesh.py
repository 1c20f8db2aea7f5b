"""A mesh of the user's own around a call: `jax.set_mesh`.

The function is traced under it, as the user's code may name its axes. Programs run on the plan's mesh, so they are
lowered and run outside of it, under jax's other settings as they were when the function was traced. Results are given
to the user on his mesh wherever that mesh can say where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import permutations
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar._compat.context import entered
from autopar.frontend import CallSignature
from autopar.frontend.signature import context_mesh


def outside() -> AbstractContextManager[Any]:
    """Leaves the mesh of `jax.set_mesh` that is around the running code, if there is one."""
    if context_mesh() is None:
        return nullcontext()
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


@contextmanager
def as_traced(signature: CallSignature) -> Iterator[None]:
    """Leaves the mesh around the running code, and enters jax's settings under which a call was traced."""
    with outside(), entered(signature.context):
        yield


def concrete(mesh: AbstractMesh, devices: Sequence[Any]) -> Mesh | None:
    """The mesh with its devices; None where it is not over all of ``devices``.

    Args:
        mesh: that of a call's signature.
        devices: of the plan, in its order.
    """
    current = jax.sharding.get_mesh()
    if current.empty or current.abstract_mesh != mesh:
        return None
    return current if set(current.devices.flat) == set(devices) else None


def on_mesh(sharding: Any, rank: int, mesh: Mesh) -> NamedSharding | None:
    """The sharding of ``mesh`` under which every device holds what it holds under ``sharding``; None if there is none.

    Args:
        sharding: a `NamedSharding` of another mesh over the same devices.
        rank: number of dims of the array.
        mesh: the mesh that the answer is said in.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = {str(a): int(n) for a, n in sharding.mesh.shape.items()}
    counts = [int(np.prod([sizes[a] for a in axes])) for axes in _axes(sharding.spec, rank)]
    for spec in _specs(counts, tuple(str(a) for a in mesh.axis_names), {str(a): int(n) for a, n in mesh.shape.items()}):
        other = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        if other.is_equivalent_to(sharding, rank):
            return other
    return None


def _axes(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    entries = [*spec, *[None] * (rank - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _specs(counts: Sequence[int], axes: tuple[str, ...], sizes: dict[str, int]) -> Iterator[PartitionSpec]:
    """Every spec that splits each dim into as many shards as ``counts`` says."""
    if not counts:
        yield PartitionSpec()
        return
    for length in range(len(axes) + 1):
        for some in permutations(axes, length):
            if int(np.prod([sizes[a] for a in some])) == counts[0]:
                rest = tuple(a for a in axes if a not in some)
                for spec in _specs(counts[1:], rest, sizes):
                    yield PartitionSpec(some or None, *spec)


def relabelled(array: Any, sharding: NamedSharding | None) -> Any:
    """``array`` as one of another mesh, on the same devices and without a copy.

    Args:
        array: a result of a program.
        sharding: from `on_mesh`; None gives ``array`` itself.
    """
    if sharding is None or not isinstance(array, jax.Array):
        return array
    shards = [s.data for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
