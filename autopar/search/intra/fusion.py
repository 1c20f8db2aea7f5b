"""Which operators a compiler fuses into their neighbours, so that their results need no memory."""

from __future__ import annotations

from autopar.cluster import Cluster
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


# Reads what elementwise operators make as it goes; the sum or maximum itself is stored.
_REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
    }
)

#: A value at least this many times as large as what it is computed from is computed again by every reader. Compilers
#: for accelerators do so with all elementwise operators, which they can fuse into any number of readers; that for CPUs
#: only where the dear ones among them (exponentials, divisions) make much of little.
GROWTH, CPU_GROWTH = 0.95, 1.9


def is_light(op: Operator) -> bool:
    """Whether the operator is computed element by element where its result is read."""
    return op.primitive not in _HEAVY and not op.effects and not op.regions


def takes_on_the_fly(op: Operator) -> bool:
    """Whether the operator needs no operand in memory: an elementwise one, or a reduction, into which those fuse."""
    return is_light(op) or (op.primitive in _REDUCTIONS and not op.effects)


def is_recomputed(op: Operator, basis_bytes: float, growth: float) -> bool:
    """Whether compilers compute the results of an elementwise operator where they are read, by several readers too.

    So they do with masks, one-hot codes, broadcasts, and conversions to a wider dtype: reading what they are made of
    takes less than writing and reading them would.

    Args:
        op: the operator.
        basis_bytes: bytes of the stored values that its results are computed from.
        growth: from `growth_of`.
    """
    return is_light(op) and growth * basis_bytes <= sum(v.type.nbytes for v in op.results)


def growth_of(cluster: Cluster) -> float:
    """`CPU_GROWTH` where a device is a CPU, else `GROWTH`."""
    return CPU_GROWTH if any("cpu" in d.jax_kinds for d in cluster.device_types) else GROWTH
