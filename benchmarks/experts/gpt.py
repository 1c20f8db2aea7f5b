"""Experts for GPT (flax nnx): data parallel, FSDP, Megatron, both, vocabulary-parallel embedding."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from benchmarks.experts.base import Expert, Shape, WeightRule, by_pattern, fully_sharded, replicated


def megatron(axis: str, vocabulary: bool = True) -> WeightRule:
    """Megatron-LM: query, key, value and up by column, out and down by row, the embedding by vocabulary."""
    column = r"\['(query|key|value|up)'\]"
    row = r"\['(out|down)'\]"
    table = ((r"\['tokens'\]\['embedding'\]", P(axis, None)),) if vocabulary else ()
    return by_pattern(
        (
            (column + r"\['kernel'\]", P(None, axis)),
            (column + r"\['bias'\]", P(axis)),
            (row + r"\['kernel'\]", P(axis, None)),
            *table,
        )
    )


def activations(batch: int, seq: int, hidden: int, ffn: int, heads: int, vocab: int, data: object,
                tensor: object = None) -> dict[Shape, P]:  # fmt: skip
    """Layouts of activations: examples over ``data``; heads, the inner width and logits over ``tensor``."""
    return {
        (batch, seq, hidden): P(data, None, None),
        (batch, seq, ffn): P(data, None, tensor),
        (batch, heads, seq, seq): P(data, tensor, None, None),
        (batch, seq, vocab): P(data, None, tensor),
    }


def experts(batch: int, seq: int, hidden: int, heads: int, vocab: int) -> tuple[Expert, ...]:
    """All experts, for 8 devices."""
    sizes = (batch, seq, hidden, 4 * hidden, heads, vocab)
    rows = activations(*sizes, "x")
    made = [
        Expert("Megatron, vocabulary split", (8,), megatron("x"), P()),
        Expert("Megatron, vocabulary whole", (8,), megatron("x", vocabulary=False), P()),
    ]
    if batch % 8 == 0:
        made += [
            Expert("data parallel", (8,), replicated, P("x"), rows),
            Expert("data parallel, left to XLA", (8,), replicated, P("x")),
            Expert("FSDP", (8,), fully_sharded(("x",), 8), P("x"), rows),
            Expert("FSDP, left to XLA", (8,), fully_sharded(("x",), 8), P("x")),
        ]
    for mesh in ((2, 4), (4, 2)):
        if batch % mesh[0] == 0:
            made.append(Expert("data x Megatron, left to XLA", mesh, megatron("y"), P("x")))
            made.append(Expert("data x Megatron", mesh, megatron("y"), P("x"), activations(*sizes, "x", "y")))
    return tuple(made)
