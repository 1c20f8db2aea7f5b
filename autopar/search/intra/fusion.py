"""Which operators a compiler fuses into their neighbours, so that their results need no memory."""

from __future__ import annotations

from autopar.ir import Operator

_HEAVY = frozenset(
    {
        "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather", "scatter", "scatter_add",
        "scatter-add", "scatter_mul", "scatter_min", "scatter_max", "sort", "top_k", "approx_top_k", "scan", "while",
        "cond", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_sum", "reduce_max", "reduce_min",
        "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin", "reduce_window",
        "reduce_window_sum",
        "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add", "fft", "cholesky",
        "triangular_solve", "lu", "qr", "eigh", "svd", "random_bits", "concatenate", "dynamic_update_slice",
        "dynamic_slice", "optimization_barrier", "custom_call", "shard_map", "pallas_call",
    }
)  # fmt: skip


def is_light(op: Operator) -> bool:
    """Whether the operator is computed element by element where its result is read."""
    return op.primitive not in _HEAVY and not op.effects and not op.regions
