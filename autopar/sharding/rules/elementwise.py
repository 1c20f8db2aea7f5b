"""Rules of elementwise primitives: every dim is a factor, of all operands and results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from autopar.ir import Operator, TensorType
from autopar.ir.types import has_zero
from autopar.sharding.factors import Dims, Factor, Rule, RuleFunction

Groups: TypeAlias = tuple[tuple[int, ...], ...]


def _aligned(op: Operator, operand_types: tuple[TensorType, ...], linear: Groups) -> Rule | None:
    """Full-rank operands and results label dim d with factor d; scalars and dims of 1 next to longer ones are whole."""
    shapes = {v.type.shape for v in op.results}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    if not all(_broadcasts(t.shape, shape) for t in operand_types):
        return None
    labels: Dims = tuple(range(len(shape)))
    return Rule(
        factors=tuple(Factor(n) for n in shape),
        operands=tuple(tuple(d if n == shape[d] else None for d, n in enumerate(t.shape)) for t in operand_types),
        results=(labels,) * len(op.results),
        linear=linear,
    )


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operand of ``shape`` is a scalar, or full-rank with dims equal to the result's or 1."""
    return shape == () or (len(shape) == len(result) and all(n in (1, m) for n, m in zip(shape, result, strict=True)))


def plain(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Elementwise and not linear: ``exp``, ``max``, ``clamp``."""
    return _aligned(op, operand_types, ())


def is_number(dtype: str) -> bool:
    """Whether partial sums of ``dtype`` make sense: not of bools, keys, tokens, and scales that have no zero."""
    return dtype.startswith(("f", "bf", "c", "i", "u")) and has_zero(dtype)


def _sums(op: Operator, operand_types: tuple[TensorType, ...]) -> bool:
    """Whether all operands given and all results are numbers."""
    return all(is_number(t.dtype) for t in (*operand_types, *(v.type for v in op.results)))


def additive(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Linear in all operands together: ``add``, ``sub``, ``neg``, ``real``, ``complex``."""
    groups = (tuple(range(len(operand_types))),) if _sums(op, operand_types) else ()
    return _aligned(op, operand_types, groups)


def multiplicative(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Linear in each operand alone: ``mul``."""
    groups = ((0,), (1,)) if _sums(op, operand_types) else ()
    return _aligned(op, operand_types, groups)


def division(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Linear in the dividend for floats; integer division rounds, so it is not."""
    real = operand_types[0].dtype.startswith(("f", "bf", "c"))
    return _aligned(op, operand_types, ((0,),) if real and _sums(op, operand_types) else ())


def select(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``select_n``: a predicate (scalar or full), then cases; linear in all cases together."""
    cases = tuple(range(1, len(operand_types)))
    return _aligned(op, operand_types, (cases,) if _sums(op, operand_types[1:]) else ())


def convert(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``convert_element_type``: linear between float widths, and where an integer only loses high bits."""
    source, target = operand_types[0], op.results[0].type
    kinds = (_kind(source.dtype), _kind(target.dtype))
    if kinds == ("int", "int"):
        # A sum that wraps in the narrow type has other high bits than the true sum.
        linear = target.nbytes <= source.nbytes
    else:
        linear = kinds[0] in ("float", "complex") and kinds[1] in (kinds[0], "complex")
    return _aligned(op, operand_types, ((0,),) if linear and _sums(op, operand_types) else ())


def _kind(dtype: str) -> str:
    if dtype.startswith(("f", "bf")):
        return "float"
    if dtype.startswith("c"):
        return "complex"
    return "int" if dtype[0] in "iu" else "other"


def bitcast(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``bitcast_convert_type``: another width adds or removes a last dim, which is kept whole."""
    if len(op.results) != 1 or len(operand_types) != 1:
        return None
    source, target = operand_types[0].shape, op.results[0].type.shape
    common = min(len(source), len(target))
    if source[:common] != target[:common]:
        return None
    labels: Dims = tuple(range(common))
    return Rule(
        factors=tuple(Factor(n) for n in source[:common]),
        operands=(labels + (None,) * (len(source) - common),),
        results=(labels + (None,) * (len(target) - common),),
    )


def broadcasting(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``threefry2x32``: numpy broadcasting from the right; stretched dims are whole in their operand."""
    shape = op.results[0].type.shape
    if any(v.type.shape != shape for v in op.results):
        return None
    operands = []
    for type in operand_types:
        lead = len(shape) - type.rank
        if lead < 0:
            return None
        operands.append(tuple(lead + d if n == shape[lead + d] else None for d, n in enumerate(type.shape)))
    labels: Dims = tuple(range(len(shape)))
    return Rule(tuple(Factor(n) for n in shape), tuple(operands), (labels,) * len(op.results))


# fmt: off
_PLAIN = (
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "ceil", "clamp", "clz", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mulhi", "ne", "nextafter", "not",
    "one_minus_square", "or", "polygamma", "polynomial", "population_count", "pow", "random_gamma_grad",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor", "zeta",
)
_ADDITIVE = (
    "add", "add_any", "complex", "conj", "copy", "copy_p", "imag", "mesh_cast", "name", "neg", "real", "reshard",
    "sharding_constraint", "stop_gradient", "sub",
)
# fmt: on

RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN, plain),
        **dict.fromkeys(_ADDITIVE, additive),
        "bitcast_convert_type": bitcast,
        "convert_element_type": convert,
        "div": division,
        "mul": multiplicative,
        "select_n": select,
        "threefry2x32": broadcasting,
    }
)
