"""Padding and cropping folded into the convolutions and window reductions next to them.

A convolution without padding of a padded array, and the crop of a convolution, have dims of sizes that devices seldom
divide (66 rows around 64). As one operator with padding of its own all dims are those of the images, and a split of
space goes through it. `fold_padding` is called with the operators of a graph that is complete. Values stay the same.
`Folding`, the walk, also serves `autopar.frontend.bordered`, whose padding is made of the array itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from autopar._compat.jaxprs import plain_params
from autopar.frontend.attrs import attrs_of
from autopar.ir import Operand, Operator, Value

Params: TypeAlias = Mapping[str, Any]
#: By dim: positions before, after and between elements, as `jax.lax.pad` takes them; negative ones are cut off.
_Config: TypeAlias = tuple[tuple[int, int, int], ...]
#: By dim: elements that are cut off before and after, and the step from one that is kept to the next.
_Crop: TypeAlias = tuple[tuple[int, int, int], ...]
_Params: TypeAlias = Mapping[str, Any]
_CONVOLUTION = "conv_general_dilated"
#: Operators with windows, and the padding that changes none of them.
_NEUTRAL: Mapping[str, float] = {
    _CONVOLUTION: 0.0,
    "reduce_window_sum": 0.0,
    "reduce_window_max": -math.inf,
    "reduce_window_min": math.inf,
}


class Folding:
    """A walk over a graph's operators that folds padding into the convolutions and windows that read it.

    Args:
        operators: of a graph, in running order.
        params_of: jax's parameters of an operator by its id.
        fixed: the value of an operand that depends on no input, else None.
    """

    def __init__(
        self, operators: Sequence[Operator], params_of: Callable[[str], Params], fixed: Callable[[Operand], Any]
    ) -> None:
        self.operators = list(operators)
        self.params_of, self.fixed = params_of, fixed
        self.names: dict[str, str] = {}

    def renamed(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        """Operands under the names that their values have now."""
        return tuple(self.names.get(o, o) if isinstance(o, str) else o for o in operands)

    def taken_up(self, n: int) -> Operator:
        """The operator at a place, which reads values under the names that they have now."""
        op = self.operators[n]
        if any(o in self.names for o in op.reads):
            op = self.operators[n] = replace(op, operands=self.renamed(op.operands))
        return op


def fold_padding(
    operators: Sequence[Operator],
    returned: Sequence[Operand],
    params_of: Callable[[str], _Params],
    fixed: Callable[[Operand], Any],
) -> tuple[Sequence[Operator], Sequence[Operand], Mapping[str, _Params]]:
    """Operators and returned values with folded padding, and jax's parameters of changed operators by id.

    Args:
        operators: of a graph, in running order.
        returned: what it returns.
        params_of: jax's parameters of an operator by its id.
        fixed: the value of an operand that depends on no input, else None.

    Operators that nothing reads any more are still there.
    """
    if all(op.primitive not in _NEUTRAL for op in operators):
        return operators, returned, {}
    folding = _PaddingWalk(operators, returned, params_of, fixed)
    for n in range(len(operators)):
        folding.visit(n)
    return folding.operators, folding.renamed(returned), folding.params


class _PaddingWalk(Folding):
    """One walk over the operators of a graph."""

    def __init__(
        self,
        operators: Sequence[Operator],
        returned: Sequence[Operand],
        params_of: Callable[[str], _Params],
        fixed: Callable[[Operand], Any],
    ) -> None:
        super().__init__(operators, params_of, fixed)
        self.params: dict[str, _Params] = {}
        self.readers = Counter(o for op in operators for o in op.reads)
        self.readers.update(o for o in returned if isinstance(o, str))
        self.producers = {v.name: n for n, op in enumerate(operators) for v in op.results}

    def visit(self, n: int) -> None:
        """Folds the padding of an operator's operands into it, or the crop that it is into what made its operand."""
        op = self.taken_up(n)
        if op.primitive in _NEUTRAL:
            for operand in range(2 if op.primitive == _CONVOLUTION else 1):
                self._pad(n, operand)
        elif op.primitive in ("pad", "slice") and self.readers[str(op.operands[0])] == 1:
            self._crop(n)

    def _maker(self, operand: Operand) -> int | None:
        return self.producers.get(operand) if isinstance(operand, str) else None

    def _pad(self, n: int, operand: int) -> None:
        op = self.operators[n]
        at = self._maker(op.operands[operand])
        pad = None if at is None else self.operators[at]
        if pad is None or pad.primitive != "pad":
            return
        value = self.fixed(pad.operands[1])
        if value is None or value != _NEUTRAL[op.primitive]:
            return
        padded = _padded(op, self._params(op), _config(pad), operand)
        if padded is not None:
            operands = [pad.operands[0] if i == operand else o for i, o in enumerate(op.operands)]
            self._change(n, replace(op, operands=tuple(operands)), padded)

    def _crop(self, n: int) -> None:
        op = self.operators[n]
        at = self._maker(op.operands[0])
        source = None if at is None else self.operators[at]
        if at is None or source is None or source.primitive not in _NEUTRAL:
            return
        crop = _crop(op, source.results[0].type.shape)
        cropped = None if crop is None else _cropped(source, self._params(source), crop)
        if cropped is not None:
            result = Value(source.results[0].name, op.results[0].type)
            self._change(at, replace(source, results=(result,)), cropped)
            self.names[op.results[0].name] = result.name
            self.readers[result.name] = self.readers[op.results[0].name]

    def _params(self, op: Operator) -> _Params:
        return self.params.get(op.id) or self.params_of(op.id)

    def _change(self, n: int, op: Operator, params: _Params) -> None:
        self.params[op.id] = params
        self.operators[n] = replace(op, attrs=attrs_of(plain_params(op.primitive, params)))


def _config(pad: Operator) -> _Config:
    config: Any = pad.attr("padding_config")
    return tuple((int(low), int(high), int(between)) for low, high, between in config)


def _crop(op: Operator, shape: tuple[int, ...]) -> _Crop | None:
    """The part of an array of ``shape`` that a slice or a pad takes; None where it adds anything."""
    kept = op.results[0].type.shape
    if op.primitive == "pad":
        config = _config(op)
        crop = tuple((-low, -high, 1) for low, high, _ in config)
        return crop if all(low >= 0 and high >= 0 for low, high, _ in crop) and not any(c[2] for c in config) else None
    strides = (1,) * len(shape) if op.attr("strides") is None else op.ints("strides")
    taken = []
    for size, start, count, by in zip(shape, op.ints("start_indices"), kept, strides, strict=True):
        taken.append((start, size - (start + (count - 1) * by + 1), by))
    return tuple(taken)


def _padded(op: Operator, params: _Params, config: _Config, operand: int) -> _Params | None:
    """Parameters of an operator that pads an operand itself; None where a dim is padded that no window slides over.

    A kernel with zeros around it is a smaller kernel, and windows that begin later and end earlier.
    """
    dims = _window_dims(op, params, operand)
    if any(amounts != (0, 0, 0) for d, amounts in enumerate(config) if d not in dims):
        return None
    if any(params.get("borders") or ()):
        return None
    name = ("lhs_dilation", "rhs_dilation")[operand] if op.primitive == _CONVOLUTION else "base_dilation"
    padding = [tuple(p) for p in params["padding"]]
    dilation = list(params.get(name) or (1,) * len(padding))
    sign = -1 if operand else 1
    for n, d in enumerate(dims):
        low, high, between = (sign * config[d][0], sign * config[d][1], config[d][2])
        # Padding counts positions, between which dilated elements lie.
        padding[n] = (int(padding[n][0] + low * dilation[n]), int(padding[n][1] + high * dilation[n]))
        dilation[n] *= between + 1
    return _allowed(op, {**params, "padding": tuple(padding), name: tuple(map(int, dilation))})


def _cropped(op: Operator, params: _Params, crop: _Crop) -> _Params | None:
    """Parameters of an operator that computes only the windows that a crop leaves."""
    dims = _window_dims(op, params, -1)
    if any(params.get("borders") or ()) or any(amounts != (0, 0, 1) for d, amounts in enumerate(crop) if d not in dims):
        return None
    padding = [tuple(p) for p in params["padding"]]
    strides = list(params["window_strides"])
    for n, d in enumerate(dims):
        low, high, by = crop[d]
        padding[n] = (int(padding[n][0] - low * strides[n]), int(padding[n][1] - high * strides[n]))
        strides[n] *= by
    return _allowed(op, {**params, "padding": tuple(padding), "window_strides": tuple(map(int, strides))})


def _allowed(op: Operator, params: _Params) -> _Params | None:
    """Parameters that jax takes: windows of reductions are not cut by negative padding."""
    negative = any(amount < 0 for amounts in params["padding"] for amount in amounts)
    return None if negative and op.primitive != _CONVOLUTION else params


def _window_dims(op: Operator, params: _Params, of: int) -> Sequence[int]:
    """Dims of an operand (0, 1) or of the result (-1) that entries of ``padding`` stand for."""
    if op.primitive != _CONVOLUTION:
        return range(len(params["padding"]))
    numbers = params["dimension_numbers"]
    return tuple((numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)[of][2:])
