"""How much is computed anew, and which operators are too dear for that."""

from __future__ import annotations

from typing import Literal, TypeAlias

from autopar.ir import Operator

Level: TypeAlias = Literal["none", "selective", "full"]

#: All levels, from the one that holds the most.
LEVELS: tuple[Level, ...] = ("none", "selective", "full")

#: What "selective" does not repeat: products, sorts, factorizations; and all operators with regions.
_DEAR = frozenset(
    {
        "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "sort", "top_k", "approx_top_k",
        "fft", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "custom_call", "shard_map", "pallas_call",
    }
)  # fmt: skip


def stays_held(op: Operator, level: Level) -> bool:
    """Whether ``op`` never runs again: what it makes is held where it is needed."""
    if op.effects or level == "none":
        return True
    return level == "selective" and (op.primitive in _DEAR or bool(op.regions))
