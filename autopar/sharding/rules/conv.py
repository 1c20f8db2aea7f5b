"""The rule of ``conv_general_dilated``: batch, features, feature groups and spatial dims are factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, parallel, rule_of
from autopar.sharding.halo import Halo
from autopar.sharding.rules.dot import contracted, product_groups
from autopar.sharding.rules.elementwise import is_number


def conv_general_dilated(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Convolutions with any order of dims, grouped or not.

    Groups of features (``feature_group_count``) are the major part of the input features, the kernel's output features
    and the result's features: splitting the groups cuts all three into shards that match. Groups of the batch
    (``batch_group_count``, which kernel gradients of grouped convolutions have) are the major part of the input's batch
    dim, the kernel's output features and the result's features. Within a group a dim is not contiguous shards of the
    whole, so nothing else of a grouped dim is a factor.
    """
    left, kernel = operand_types
    result = op.results[0].type
    batch, feature = op.ints("lhs_spec")[:2]
    kernel_out, kernel_in = op.ints("rhs_spec")[:2]
    result_batch, result_feature = op.ints("out_spec")[:2]
    groups, batch_groups = op.integer("feature_group_count"), op.integer("batch_group_count")
    if groups > 1 and batch_groups > 1:
        return None
    loops = []
    if batch_groups == 1:
        loops.append(parallel(left.shape[batch], (0, batch), (2, result_batch)))
    if groups > 1:
        loops.append(parallel(groups, (0, feature), (1, kernel_out), (2, result_feature)))
    elif batch_groups > 1:
        loops.append(parallel(batch_groups, (0, batch), (1, kernel_out), (2, result_feature)))
    else:
        loops.append(parallel(kernel.shape[kernel_out], (1, kernel_out), (2, result_feature)))
    if groups == 1:
        loops += contracted(left.shape[feature], result, (0, feature), (1, kernel_in))
    loops += _spatial(op, left, kernel, result)
    return rule_of(loops, op, operand_types, product_groups(operand_types, result))


def windows(size: int, taps: int, count: int, steps: tuple[int, int, int], low: int) -> tuple[Halo, bool]:
    """The windows of one spatial dim, and whether they are as many as the kernel has elements.

    Args:
        size: elements of the input.
        taps: elements of the kernel.
        count: elements of the result.
        steps: ``window_strides``, ``rhs_dilation`` and ``lhs_dilation`` of the dim.
        low: padding before the first element.
    """
    if count >= taps:
        return Halo.sliding(size, count, taps, steps, low), False
    return Halo.sliding(size, taps, count, (steps[1], steps[0], steps[2]), low), True


def bordered(halo: Halo, border: tuple[Any, ...] | None) -> Halo:
    """Windows over a dim with borders.

    Args:
        halo: the windows, as over zeros.
        border: (mode of `jnp.pad`, side, positions before and after); None for zeros.
    """
    if border is None:
        return halo
    mode, _, low, high = border
    return replace(halo, wraps=True) if mode == "wrap" else replace(halo, least=max(low, high) + 1)


def _spatial(op: Operator, left: TensorType, kernel: TensorType, result: TensorType) -> list[FactorPlaces]:
    """A loop a spatial dim: over the windows, or over the kernel's elements where it has more (kernel gradients).

    Either way the window of a shard slides over the input, by ``window_strides`` from one element of the result to the
    next and by ``rhs_dilation`` from one element of the kernel to the next.
    """
    loops = []
    padding: Any = op.attr("padding")
    borders: Any = dict(op.attrs).get("borders") or (None,) * len(padding)
    dims = zip(op.ints("lhs_spec")[2:], op.ints("rhs_spec")[2:], op.ints("out_spec")[2:], strict=True)
    for n, (at, in_kernel, in_result) in enumerate(dims):
        size, taps, count = left.shape[at], kernel.shape[in_kernel], result.shape[in_result]
        if not size or not taps or not count:
            continue
        steps = op.ints("window_strides")[n], op.ints("rhs_dilation")[n], op.ints("lhs_dilation")[n]
        halo, summed = windows(size, taps, count, steps, padding[n][0])
        halo = bordered(halo, borders[n])
        if not summed:
            loops.append(FactorPlaces(Factor(count, halo=halo), ((0, at), (2, in_result))))
        elif is_number(result.dtype):
            loops.append(FactorPlaces(Factor(taps, reduce="sum", halo=halo), ((0, at), (1, in_kernel))))
    return loops


RULES: Mapping[str, RuleFunction] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
