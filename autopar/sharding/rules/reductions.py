"""Rules of reductions, scans along a dim, and sorting."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Dims, Factor, Rule, RuleFunction
from autopar.sharding.rules.elementwise import is_number


def reduction(shape: tuple[int, ...], axes: tuple[int, ...], kind: str | None, results: int, linear: bool) -> Rule:
    """Every dim is a factor; those in ``axes`` are reduced by ``kind``, or kept whole where it is None.

    Args:
        shape: of the operand.
        axes: its dims that the results do not have.
        kind: "sum", "max", "min", "and", "or" or None.
        results: how many results there are.
        linear: whether sums of operands give sums of results.
    """
    kept = [d for d in range(len(shape)) if d not in axes]
    split = [d for d in range(len(shape)) if d not in axes or kind is not None]
    index = {d: i for i, d in enumerate(split)}
    return Rule(
        factors=tuple(Factor(shape[d], reduce=kind if d in axes else None) for d in split),
        operands=(tuple(index.get(d) for d in range(len(shape))),),
        results=(tuple(index[d] for d in kept),) * results,
        linear=((0,),) if linear else (),
    )


def reduce_sum(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Linear; a split of a summed dim leaves partial sums."""
    (type,) = operand_types
    return reduction(type.shape, op.ints("axes"), "sum", 1, is_number(type.dtype))


def reduce_extreme(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """``reduce_max`` and ``reduce_min``; complex numbers have an order but no collective of it."""
    (type,) = operand_types
    kind = None if type.dtype.startswith("c") else op.primitive.removeprefix("reduce_")
    return reduction(type.shape, op.ints("axes"), kind, 1, False)


def reduce_logical(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """``reduce_and`` and ``reduce_or``: of bools partial, of the bits of integers whole."""
    (type,) = operand_types
    kind = op.primitive.removeprefix("reduce_") if type.dtype == "bool" else None
    return reduction(type.shape, op.ints("axes"), kind, 1, False)


def over_positions(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``psum``, ``pmax`` and ``pmin`` as `jax.vmap` with an axis name leaves them: reductions of dims."""
    axes = op.attr("axes")
    if len(operand_types) != 1 or op.attr("axis_index_groups") is not None or not isinstance(axes, tuple):
        return None
    if not all(isinstance(a, int) for a in axes):
        return None
    (type,) = operand_types
    kind = {"psum": "sum", "pmax": "max", "pmin": "min"}[op.primitive]
    if not is_number(type.dtype) or (type.dtype.startswith("c") and kind != "sum"):
        return None
    return reduction(type.shape, op.ints("axes"), kind, 1, kind == "sum")


def reduce_whole(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Reductions without a collective of their kind: products, xor, argmax, argmin."""
    (type,) = operand_types
    return reduction(type.shape, op.ints("axes"), None, len(op.results), False)


def reduce_any(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``reduce`` with a user's function: arrays, then as many scalar initial values; dims not reduced split."""
    count = len(op.results)
    shapes = {t.shape for t in operand_types[:count]}
    if len(shapes) != 1 or len(operand_types) != 2 * count:
        return None
    rule = reduction(shapes.pop(), op.ints("dimensions"), None, count, False)
    initial: tuple[Dims, ...] = ((),) * count
    return Rule(rule.factors, rule.operands * count + initial, rule.results)


def _along(op: Operator, operand_types: tuple[TensorType, ...], dim: int, linear: bool) -> Rule | None:
    """All operands and results of one shape; every dim but ``dim`` is a factor."""
    shapes = {t.shape for t in (*operand_types, *(v.type for v in op.results))}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    split = [d for d in range(len(shape)) if d != dim]
    labels: Dims = tuple(split.index(d) if d != dim else None for d in range(len(shape)))
    return Rule(
        factors=tuple(Factor(shape[d]) for d in split),
        operands=(labels,) * len(operand_types),
        results=(labels,) * len(op.results),
        linear=((0,),) if linear else (),
    )


def cumulative(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``cumsum`` and its kin: not along the dim that accumulates. ``cumsum`` is linear."""
    linear = op.primitive == "cumsum" and is_number(operand_types[0].dtype)
    return _along(op, operand_types, op.integer("axis"), linear)


def sort(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """``sort`` of several operands: not along the sorted dim."""
    return _along(op, operand_types, op.integer("dimension"), False)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "argmax": reduce_whole,
        "argmin": reduce_whole,
        "cumlogsumexp": cumulative,
        "cummax": cumulative,
        "cummin": cumulative,
        "cumprod": cumulative,
        "cumsum": cumulative,
        "pmax": over_positions,
        "pmin": over_positions,
        "psum": over_positions,
        "reduce": reduce_any,
        "reduce_and": reduce_logical,
        "reduce_max": reduce_extreme,
        "reduce_min": reduce_extreme,
        "reduce_or": reduce_logical,
        "reduce_prod": reduce_whole,
        "reduce_sum": reduce_sum,
        "reduce_xor": reduce_whole,
        "sort": sort,
    }
)
