"""Classes of primitives: which of jax's names stand for products, reductions, views, and so on.

A rule that holds for a class of primitives asks here. A new primitive is added to each class that it belongs to.
"""

from __future__ import annotations

from typing import Final

from autopar.ir.graph import Literal, Operator

#: Ranges and constants: they take nothing and hold no data that would have to move.
GENERATED: Final = frozenset({"constant", "iota"})

#: Sums of products.
CONTRACTIONS: Final = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"})
#: Those whose operands have dims of the batch, dims that stay and dims that are summed over.
DENSE_CONTRACTIONS: Final = frozenset({"conv_general_dilated", "dot_general"})

SORTS: Final = frozenset({"approx_top_k", "sort", "top_k"})
FACTORIZATIONS: Final = frozenset({"cholesky", "eigh", "fft", "lu", "qr", "svd", "triangular_solve"})
#: What takes the last two dims of its first operand whole: factorizations of matrices, and the steps of them.
OF_MATRICES: Final = frozenset(
    {
        "cholesky",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "qr",
        "schur",
        "svd",
        "symmetric_product",
        "tridiagonal",
    }
)
#: Kernels of which nothing is known but what they take and return.
OPAQUE: Final = frozenset({"custom_call", "pallas_call", "shard_map"})
#: Calls into Python.
CALLBACKS: Final = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
#: What selective recomputation does not repeat; operators with regions neither.
EXPENSIVE: Final = CONTRACTIONS | SORTS | FACTORIZATIONS | OPAQUE

#: Operators with bodies.
REGIONS: Final = frozenset({"cond", "scan", "while"})

#: Reductions over dims by one commutative operator.
REDUCTIONS: Final = frozenset(
    {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor"}
)
INDEX_REDUCTIONS: Final = frozenset({"argmax", "argmin"})
CUMULATIVE: Final = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"})
WINDOWED: Final = frozenset(
    {
        "reduce_window",
        "reduce_window_max",
        "reduce_window_min",
        "reduce_window_sum",
        "select_and_gather_add",
        "select_and_scatter_add",
    }
)

#: A new name for the same bytes.
VIEWS: Final = frozenset(
    {
        "bitcast_convert_type",
        "expand_dims",
        "optimization_barrier",
        "reshape",
        "squeeze",
        "stage_boundary",
        "stop_gradient",
        "wire",
    }
)
#: Another shape of the same elements.
RESHAPES: Final = frozenset({"expand_dims", "reshape", "squeeze"})
#: The same elements, perhaps in another dtype.
CASTS: Final = frozenset({"convert_element_type", "copy"})
#: Each result is the operand of the same number.
PASSED_ON: Final = frozenset({"device_put", "optimization_barrier", "stage_boundary", "wire"})
#: Whose results lie as the operands do: the same values under other names.
ALIASES: Final = frozenset({"optimization_barrier", "wire"})

#: Read only what they return, however large the operand is.
SLICES: Final = frozenset({"dynamic_slice", "gather", "slice"})
#: Read and write only as much as their update, operand 2, in place.
SCATTERS: Final = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})

#: Linear in both operands, element by element.
ADDITIONS: Final = frozenset({"add", "add_any", "sub"})
#: Whose results are sums, of elements or products of the operands.
SUMS: Final = ADDITIONS | CONTRACTIONS | {"cumsum", "reduce_sum"}
COMPARISONS: Final = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})

#: Elementwise operators whose operands and result all have one dtype.
SAME_DTYPE: Final = frozenset(
    {
        "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp", "copy",
        "cos", "cosh", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "log", "log1p",
        "log2", "logistic", "max", "min", "mul", "neg", "nextafter", "not", "one_minus_square", "or",
        "reduce_precision", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
        "xor",
    }
)  # fmt: skip
#: Elementwise operators of whose result only the shape follows from the operands.
SAME_SHAPE: Final = frozenset(
    {"abs", "complex", "conj", "convert_element_type", "imag", "is_finite", "pow", "real", "select_n"}
)
#: One operation an element of the result.
ELEMENTWISE: Final = (SAME_DTYPE - {"copy"}) | SAME_SHAPE | COMPARISONS | {
    "add_any", "bessel_i0e", "bessel_i1e", "clz", "digamma", "igamma", "igamma_grad_a", "igammac", "lgamma",
    "polygamma", "population_count", "regularized_incomplete_beta", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "zeta",
}  # fmt: skip
#: Elementwise, but too expensive for a compiler to compute again for every reader (XLA's
#: `InstructionFusion::IsExpensive`).
TRANSCENDENTAL: Final = frozenset(
    {
        "atan2", "cbrt", "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin",
        "sqrt", "tan", "tanh",
    }
)  # fmt: skip

#: Operators with kernels of their own: what they take and return lies in memory.
UNFUSED: Final = EXPENSIVE | REGIONS | REDUCTIONS | INDEX_REDUCTIONS | CUMULATIVE | WINDOWED | SCATTERS | {
    "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "optimization_barrier", "random_bits", "reduce",
    "roll",
}  # fmt: skip


def is_generator(op: Operator) -> bool:
    """Whether an operator can be made in any layout on demand: a filled array, a range, a constant."""
    if op.effects or op.regions:
        return False
    if op.primitive == "broadcast_in_dim":
        return len(op.operands) == 1 and isinstance(op.operands[0], Literal)
    return op.primitive in GENERATED and not op.operands


def is_zero(op: Operator) -> bool:
    """Whether a generator makes zeros only."""
    return op.primitive == "broadcast_in_dim" and isinstance(op.operands[0], Literal) and op.operands[0].is_zero


def is_fusible(op: Operator) -> bool:
    """Whether compilers compute an operator element by element where its result is read."""
    return op.primitive not in UNFUSED and not op.effects and not op.regions


def reads_fused(op: Operator) -> bool:
    """Whether an operator needs no operand in memory: a fusible one, or a reduction, into which those fuse.

    The sum or maximum itself is stored.
    """
    return is_fusible(op) or (op.primitive in REDUCTIONS | INDEX_REDUCTIONS and not op.effects)


def wire_of(op: Operator) -> str:
    """Text of the `autopar.ir.formats.WireFormat` in which the result of an operator is sent; "" as it is."""
    return str(op.attr("format")) if op.primitive == "wire" else ""
