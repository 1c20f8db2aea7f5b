"""Experts for the multilayer perceptron."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from benchmarks.experts.base import Expert, Shape, WeightRule, by_pattern, fully_sharded, replicated


def megatron(axis: str) -> WeightRule:
    """Even layers split by column, odd ones by row: one all-reduce for two layers in each direction."""
    return by_pattern(
        (
            (r"\[\d*[02468]\]\['w'\]", P(None, axis)),
            (r"\[\d*[02468]\]\['b'\]", P(axis)),
            (r"\[\d*[13579]\]\['w'\]", P(axis, None)),
        )
    )


def experts(batch: int, hidden: int) -> tuple[Expert, ...]:
    """All experts, for 8 devices."""
    rows: Mapping[Shape, P] = {(batch, hidden): P("x", None)}
    pairs: Mapping[Shape, P] = {(batch, hidden): P(("x", "y"), None)}
    return (
        Expert("data parallel", (8,), replicated, P("x"), rows),
        Expert("data parallel, left to XLA", (8,), replicated, P("x")),
        Expert("FSDP", (8,), fully_sharded(("x",), 8), P("x"), rows),
        Expert("FSDP, left to XLA", (8,), fully_sharded(("x",), 8), P("x")),
        Expert("Megatron", (8,), megatron("x"), P()),
        Expert("data x Megatron", (2, 4), megatron("y"), P("x")),
        Expert("data x Megatron", (4, 2), megatron("y"), P("x")),
        Expert("FSDP on two axes", (2, 4), fully_sharded(("x", "y"), 8), P(("x", "y")), pairs),
    )
