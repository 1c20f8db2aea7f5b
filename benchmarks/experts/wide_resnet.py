"""Experts for Wide-ResNet."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from benchmarks.experts.base import Expert, fully_sharded, replicated


def experts() -> tuple[Expert, ...]:
    """All experts, for 8 devices; activations are left to XLA."""
    return (
        Expert("data parallel", (8,), replicated, P("x")),
        Expert("FSDP", (8,), fully_sharded(("x",), 8), P("x")),
    )
