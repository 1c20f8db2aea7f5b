"""Experts for LLaMA (layers stacked for a scan): data parallel, FSDP, Megatron with the vocabulary split, both."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from benchmarks.experts.base import Expert, Shape, WeightRule, by_pattern, fully_sharded, replicated


def megatron(axis: str) -> WeightRule:
    """Queries, keys, values, gate and up by column, out and down by row, embedding and head by vocabulary."""
    return by_pattern(
        (
            (r"\['(wq|wk|wv|gate|up)'\]", P(None, None, axis)),
            (r"\['(wo|down)'\]", P(None, axis, None)),
            (r"\['embed'\]", P(axis, None)),
            (r"\['head'\]", P(None, axis)),
        )
    )


def fsdp(axes: tuple[str, ...], n: int) -> WeightRule:
    """FSDP whose scanned leaves are split along a dim behind that of the layers, so that a layer is gathered alone."""
    flat = fully_sharded(axes, n)

    def rule(path: str, shape: Shape) -> P:
        return P(None, *flat(path, shape[1:])) if "['layers']" in path else flat(path, shape)

    return rule


def experts(batch: int, seq: int, hidden: int, vocab: int) -> tuple[Expert, ...]:
    """All experts, for 8 devices. Inside the scan XLA spreads the layouts that it is given outside."""

    def outside(data: str | None, tensor: str | None) -> dict[Shape, P]:
        return {(batch, seq, hidden): P(data, None, None), (batch, seq, vocab): P(data, None, tensor)}

    made = [
        Expert("Megatron, vocabulary split", (8,), megatron("x"), P(), outside(None, "x")),
        Expert("Megatron, left to XLA", (8,), megatron("x"), P()),
    ]
    if batch % 8 == 0:
        made += [
            Expert("data parallel", (8,), replicated, P("x"), outside("x", None)),
            Expert("data parallel, left to XLA", (8,), replicated, P("x")),
            Expert("FSDP", (8,), fsdp(("x",), 8), P("x"), outside("x", None)),
            Expert("FSDP, left to XLA", (8,), fsdp(("x",), 8), P("x")),
        ]
    for mesh in ((2, 4), (4, 2)):
        if batch % mesh[0] == 0:
            made.append(Expert("data x Megatron", mesh, megatron("y"), P("x"), outside("x", "y")))
    return tuple(made)
