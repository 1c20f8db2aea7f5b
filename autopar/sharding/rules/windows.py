"""Rules of sliding windows: dims are factors, those over which windows slide with the edges of their neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Factor, FactorPlaces, Rule, RuleFunction, parallel, rule_of
from autopar.sharding.halo import Halo
from autopar.sharding.rules.elementwise import is_number


def _still(op: Operator) -> list[int]:
    """Dims with a window of 1, a step of 1, no padding and no dilation: every element is its own window."""
    attrs = dict(op.attrs)
    window = op.ints("window_dimensions")
    ones = (1,) * len(window)
    strides = op.ints("window_strides")
    dilation = op.ints("base_dilation") if "base_dilation" in attrs else ones
    padding = attrs["padding"]
    if not isinstance(padding, tuple) or len(padding) != len(window):
        raise ValueError(f"padding of {op.id} is {padding}")
    return [d for d in range(len(window)) if (window[d], strides[d], dilation[d]) == (1, 1, 1) and padding[d] == (0, 0)]


def _halo(op: Operator, dim: int, size: int, count: int, *, returns: bool = False) -> Halo:
    """The windows over ``dim``, which has ``size`` elements and ``count`` windows."""
    attrs = dict(op.attrs)
    ones = (1,) * len(op.ints("window_dimensions"))
    spread, base = (op.ints(n) if n in attrs else ones for n in ("window_dilation", "base_dilation"))
    padding: Any = attrs["padding"]
    steps = op.ints("window_strides")[dim], spread[dim], base[dim]
    halo = Halo.sliding(size, count, op.ints("window_dimensions")[dim], steps, padding[dim][0])
    return replace(halo, returns=returns)


def _windowed(op: Operator, operand_types: tuple[TensorType, ...], linear: bool, slides: bool = False) -> Rule | None:
    """Still dims are factors of every tensor that is not a scalar, with ``slides`` also the others of operand 0.

    ``linear``: in operand 0.
    """
    types = (*operand_types, *(v.type for v in op.results))
    full = [i for i, t in enumerate(types) if t.rank]
    rank = len(op.ints("window_dimensions"))
    still = _still(op)
    if any(types[i].rank != rank for i in full):
        return None
    if not full or any(len({types[i].shape[d] for i in full}) != 1 for d in still):
        return None
    loops = [parallel(types[full[0]].shape[d], *((i, d) for i in full)) for d in still]
    if slides and len(full) == 2:
        size, count = types[0].shape, types[-1].shape
        moving = [d for d in range(rank) if d not in still and size[d] and count[d]]
        loops += [FactorPlaces(Factor(size[d], halo=_halo(op, d, size[d], count[d])), ((0, d), (1, d))) for d in moving]
    return rule_of(loops, op, operand_types, ((0,),) if linear and is_number(operand_types[0].dtype) else ())


def largest(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Largest and smallest of a window."""
    return _windowed(op, operand_types, False, slides=True)


def sums(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Rule of sums over windows, which are linear."""
    return _windowed(op, operand_types, True, slides=True)


def scattered(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Gradients of the largest of a window: of each window to the element that was the largest. Linear in operand 0.

    Windows of one device may lie on elements of its neighbour, to which their gradients then go back.
    """
    still = _windowed(op, operand_types, True)
    source, values = operand_types
    if still is None or source.rank != values.rank:
        return still
    whole = [d for d, factor in enumerate(still.results[0]) if factor is None and source.shape[d] and values.shape[d]]
    loops = [
        FactorPlaces(factor, tuple((t, dims.index(n)) for t, dims in enumerate((*still.operands, *still.results))))
        for n, factor in enumerate(still.factors)
    ]
    for d in whole:
        halo = _halo(op, d, values.shape[d], source.shape[d], returns=True)
        loops.append(FactorPlaces(Factor(values.shape[d], halo=halo, halo_operand=1), ((0, d), (1, d), (2, d))))
    return rule_of(loops, op, operand_types, still.linear)


def plain(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Windows with a function of the user."""
    return _windowed(op, operand_types, False)


def tangents(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Tangents of the largest element of a window: linear in operand 0."""
    return _windowed(op, operand_types, True)


RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "reduce_window": plain,
        "reduce_window_max": largest,
        "reduce_window_min": largest,
        "reduce_window_sum": sums,
        "select_and_gather_add": tangents,
        "select_and_scatter": plain,
        "select_and_scatter_add": scattered,
    }
)
