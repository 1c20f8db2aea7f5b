"""State that lies in host memory between updates, in a program: see `autopar.search.intra.host`.

Such an input comes in jax's memory kind "pinned_host", is moved to the device where it is first read, and what
replaces it leaves in the same kind. When the move to the device begins is the compiler's choice: XLA's for TPU begins
early while there is room, and late where there is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import partition_spec
from autopar.errors import PlanMismatchError
from autopar.ir import Layout
from autopar.plan import InputRecord, OutputRecord, PlanContent

#: jax's name of a host's memory from which devices copy by themselves.
PINNED_HOST = "pinned_host"


@dataclass(frozen=True)
class Hosted:
    """Values of a program in host memory.

    Args:
        inputs: indices of inputs.
        outputs: indices of the outputs that replace them.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]


def hosted_of(content: PlanContent) -> Hosted:
    """Values that a plan of one stage keeps in host memory."""
    paths = {r.path for r in content.inputs if r.memory == "host"}
    return Hosted(
        frozenset(n for n, r in enumerate(content.inputs) if r.path in paths),
        frozenset(n for n, r in enumerate(content.outputs) if r.updates in paths),
    )


def sharding_of(record: InputRecord | OutputRecord, mesh: Mesh | AbstractMesh, *, host: bool) -> NamedSharding:
    """Sharding of an input or output on a mesh, or next to it in host memory."""
    return placed(mesh, partition_spec(Layout.parse(record.layout).dims), host=host)


def placed(mesh: Mesh | AbstractMesh, spec: PartitionSpec, *, host: bool) -> NamedSharding:
    """The sharding of ``spec`` on a mesh, or next to it in host memory."""
    return NamedSharding(mesh, spec, memory_kind=PINNED_HOST) if host else NamedSharding(mesh, spec)


def check_host_memory(content: PlanContent, devices: Sequence[Any]) -> None:
    """Raises PlanMismatchError where a plan keeps something in host memory that the devices cannot copy from."""
    count = sum(r.memory == "host" for r in content.inputs)
    wanted = count or any(s.form.activations_offloaded or s.host_bytes for s in content.stages)
    if wanted:
        check_pinned(f"the plan keeps {count or 'activations'}{' inputs' if count else ''} in host memory", devices)


def check_pinned(fact: str, devices: Sequence[Any]) -> None:
    """Raises PlanMismatchError unless devices have access to the memory of their host.

    Args:
        fact: why they must.
        devices: of this process.
    """
    if any(PINNED_HOST not in {m.kind for m in d.addressable_memories()} for d in devices):
        raise PlanMismatchError(
            f"{fact}, and {devices[0].device_kind} has no {PINNED_HOST}",
            cause="this version of jax gives these devices no access to the memory of their host",
            remedy="plan with offload='none'",
        )


def to_host(array: Any) -> Any:
    """The shard of a device, moved to host memory."""
    return jax.device_put(array, jax.memory.Space.Host)


def to_device(array: Any) -> Any:
    """The shard of a device, moved from host memory; as it is where it is there."""
    return jax.device_put(array, jax.memory.Space.Device)
