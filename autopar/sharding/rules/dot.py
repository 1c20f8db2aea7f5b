"""Rules of matrix products: batch, free and contracted dims are factors."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from autopar.ir import Operator, TensorType, is_float, item_bytes
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, parallel, rule_of
from autopar.sharding.halo import Halo
from autopar.sharding.rules.elementwise import is_number

_Ints: TypeAlias = tuple[int, ...]
_DotDims: TypeAlias = tuple[tuple[_Ints, _Ints], tuple[_Ints, _Ints]]


def product_groups(operand_types: tuple[TensorType, ...], result: TensorType) -> tuple[tuple[int, ...], ...]:
    """Linear groups of a product of operands 0 and 1: each alone, where a partial sum of it can be multiplied.

    Terms of an integer sum wrap at the operand's width, so the result must not be wider than the operand.
    """
    return tuple((i,) for i in (0, 1) if _sums_pass(operand_types[i].dtype, result.dtype))


def _sums_pass(dtype: str, result: str) -> bool:
    if is_float(dtype):
        return is_float(result)
    return is_number(dtype) and is_number(result) and not is_float(result) and item_bytes(dtype) >= item_bytes(result)


def contracted(size: int, result: TensorType, *places: tuple[int, int]) -> tuple[FactorPlaces, ...]:
    """The loop of a contracted dim, or none where results cannot be added (bools)."""
    return (FactorPlaces(Factor(size, reduce="sum"), places),) if is_number(result.dtype) else ()


def band(op: Operator) -> tuple[int, Halo] | None:
    """The operand that a fixed band matrix multiplies, and the windows over it."""
    windows: Any = dict(op.attrs).get("band")
    return None if windows is None else (windows[0], Halo(*windows[1:]))


def _banded(op: Operator, operand_types: tuple[TensorType, ...], side: int, halo: Halo) -> Rule:
    """A product with a fixed matrix, of which a shard of the result needs its columns; see `band`."""
    contract, _ = _nested(op.attr("dimension_numbers"))
    taken, (dim,), (row,) = operand_types[side], contract[side], contract[1 - side]
    free = [d for d in range(taken.rank) if d != dim]
    first, at = (0, len(free)) if side == 0 else (1, 0)
    loops = [parallel(taken.shape[d], (side, d), (2, first + n)) for n, d in enumerate(free)]
    places = tuple(sorted(((side, dim), (1 - side, 1 - row), (2, at))))
    loops.append(FactorPlaces(Factor(halo.count, halo=halo, halo_operand=side), places))
    return rule_of(loops, op, operand_types, product_groups(operand_types, op.results[0].type))


def dot_general(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """``bij,bjk->bik`` for any dimension numbers. Result dims: batch, then free of the left, then of the right.

    With a fixed matrix whose nonzeros lie in a band, the dim that it maps is split with edges of neighbours.
    """
    banded = band(op)
    if banded is not None:
        return _banded(op, operand_types, *banded)
    contract, batch = _nested(op.attr("dimension_numbers"))
    left, right = operand_types
    result = op.results[0].type
    free = _free(left, contract[0], batch[0]), _free(right, contract[1], batch[1])
    loops = [parallel(left.shape[i], (0, i), (1, j), (2, r)) for r, (i, j) in enumerate(zip(*batch, strict=True))]
    first = len(batch[0])
    loops += [parallel(left.shape[d], (0, d), (2, first + n)) for n, d in enumerate(free[0])]
    first += len(free[0])
    loops += [parallel(right.shape[d], (1, d), (2, first + n)) for n, d in enumerate(free[1])]
    for i, j in zip(*contract, strict=True):
        loops += contracted(left.shape[i], result, (0, i), (1, j))
    return rule_of(loops, op, operand_types, product_groups(operand_types, result))


def ragged_dot_general(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule:
    """Products of groups of rows, whose sizes are the third operand and stay whole.

    Where all batches have the same groups, rows are a loop and so are groups. On a device that has the matrices of some
    groups all rows of others are zeros, so that the result is a partial sum; rows that are contracted leave one too.
    Where group sizes differ by batch, rows, groups, batch dims and free dims of the left stay whole.
    """
    (contract, batch), ragged, group = _ragged(op)
    left, right, sizes = operand_types[:3]
    result = op.results[0].type
    free = _free(left, contract[0], batch[0]), _free(right, (*contract[1], *group), batch[1])
    # A ragged contracted dim makes one product a group: the result has a group dim in front.
    first = 1 if ragged[0] in contract[0] else 0
    shared = sizes.rank == 1
    splits = shared and is_number(result.dtype)
    # One dim of rows and one of groups: a product whose rows are a batch dim has none that can be counted.
    rows = ragged[0] if splits and ragged[0] not in batch[0] else None
    loops = []
    if rows is not None and first:
        loops.append(parallel(sizes.shape[0], (3, 0)))
    elif rows is not None and group:
        loops.append(FactorPlaces(Factor(right.shape[group[0]], reduce="sum"), ((1, group[0]),)))
    loops += [
        parallel(left.shape[i], (0, i), (1, j), (3, first + n))
        for n, (i, j) in enumerate(zip(*batch, strict=True))
        if shared and i not in ragged
    ]
    first += len(batch[0])
    loops += [
        parallel(left.shape[d], (0, d), (3, first + n))
        for n, d in enumerate(free[0])
        if shared and (d not in ragged or d == rows)
    ]
    first += len(free[0])
    loops += [parallel(right.shape[d], (1, d), (3, first + n)) for n, d in enumerate(free[1])]
    for i, j in zip(*contract, strict=True):
        if i not in ragged or i == rows:
            loops += contracted(left.shape[i], result, (0, i), (1, j))
    return rule_of(loops, op, operand_types, product_groups(operand_types, result))


def _free(type: TensorType, contract: _Ints, batch: _Ints) -> list[int]:
    return [d for d in range(type.rank) if d not in contract and d not in batch]


def _nested(value: Any) -> _DotDims:
    """``((left, right) contracted, (left, right) batch)``; ValueError or TypeError where it is not that."""
    (left, right), (left_batch, right_batch) = value
    return (tuple(left), tuple(right)), (tuple(left_batch), tuple(right_batch))


def _ragged(op: Operator) -> tuple[_DotDims, _Ints, _Ints]:
    """Dot, ragged and group dims of a ragged product, from the text of its dimension numbers.

    ValueError where they read otherwise, or where a ``group_offset`` is given.
    """
    text = str(op.attr("ragged_dot_dimension_numbers"))
    names = ("dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions")
    pattern = r"\w+\(" + ", ".join(f"{name}=(.*)" for name in names) + r"\)"
    match = re.fullmatch(pattern, text)
    if match is None or len(op.operands) != 3:
        raise ValueError(f"dimension numbers of {op.id} are {text}")
    dot, ragged, group = (ast.literal_eval(part) for part in match.groups())
    return _nested(dot), tuple(ragged), tuple(group)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {"dot_general": dot_general, "ragged_dot_general": ragged_dot_general}
)
