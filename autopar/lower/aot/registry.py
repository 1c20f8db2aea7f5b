"""Targets by the word that their text begins with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.lower.aot import cuda, tpu
from autopar.lower.aot.base import Target
from autopar.lower.aot.cpu import CpuTarget


def _parse_cpu(text: str) -> Target:
    match = re.fullmatch(r"cpu(?::([1-9]\d*))?", text)
    if not match:
        raise AutoparError(f"{text!r} is not a CPU target", remedy="write cpu, or cpu:N for N devices")
    return CpuTarget(text, int(match[1]) if match[1] else None)


#: By first word.
TARGETS: Mapping[str, Callable[[str], Target]] = MappingProxyType(
    {"cpu": _parse_cpu, "cuda": cuda.parse_cuda, "tpu": tpu.parse_tpu}
)


def parse_target(text: str) -> Target:
    """The target that a user wrote.

    Args:
        text: ``cpu``, ``cpu:N``, ``tpu:KIND:TOPOLOGY`` or ``cuda:DEVICE:NODESxDEVICES``.

    Raises:
        AutoparError: it is none of these.
    """
    parse = TARGETS.get(text.partition(":")[0]) if isinstance(text, str) else None
    if parse is None:
        raise AutoparError(
            f"no target is called {text!r}",
            remedy="one of: cpu, tpu:v5p:4x4x4, tpu:v5e:16x16, cuda:h100:8x8 (nodes x devices)",
        )
    return parse(text)


def target_of(cluster: Cluster) -> Target:
    """The target whose devices a cluster has: those of its cluster file.

    Raises:
        AutoparError: no compiler can be asked about such a cluster.
    """
    name = cluster.name.removeprefix("local-")
    group = cluster.groups[0]
    if len(cluster.groups) == 1:
        if "cpu" in group.device.jax_kinds:
            return parse_target(f"cpu:{cluster.num_devices}")
        for kind, file in cuda.KINDS.items():
            if file == name:
                return parse_target(f"cuda:{kind}:{group.count}x{group.devices_per_node}")
        for kind, (file, dims) in tpu.KINDS.items():
            if file == name:
                return parse_target(f"tpu:{kind}:{'x'.join(map(str, _torus(cluster.num_devices, dims)))}")
    raise AutoparError(
        f"no compiler is known for the devices of {cluster.name!r}",
        remedy='name the target: target="cpu", "tpu:v5p:4x4x4" or "cuda:h100:8x8"',
    )


def _torus(chips: int, dims: int) -> tuple[int, ...]:
    """``chips`` as a torus that is as nearly a cube as powers of two allow, longest dim last."""
    sizes = [1] * dims
    while chips > 1:
        p = next(k for k in range(2, chips + 1) if chips % k == 0)
        sizes[sizes.index(min(sizes))] *= p
        chips //= p
    return tuple(sorted(sizes))
