"""Values that a program computes of numbers alone: tables of positions and weights, as `jax.image.resize` makes them.

They are computed here with numpy where an operator's meaning depends on them, so that no device is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Literal, Operand, Operator

_LARGEST = 1 << 23
_LONGEST_CHAIN = 200
#: (operator, its operands) -> its result.
_Compute = Callable[[Operator, list[Any]], Any]


class _UnknownError(Exception):
    """The value depends on an input, or on an operator that is not in the table."""


@dataclass(frozen=True)
class FixedValues:
    """Computes values of a graph in the making that depend on none of its inputs.

    Args:
        producers: operator that makes a value, by the value's name.
        known: values that were asked for; None of those that cannot be computed here.
    """

    producers: Mapping[str, Operator]
    known: MutableMapping[str, Any] = field(default_factory=dict)

    def value(self, operand: Operand) -> Any:
        """The value as a numpy array; None where it depends on an input or is too large to look at."""
        try:
            return self._value(operand, _LONGEST_CHAIN)
        except _UnknownError:
            return None

    def _value(self, operand: Operand, room: int) -> Any:
        if isinstance(operand, Literal):
            return _literal(operand)
        if operand not in self.known:
            self.known[operand] = None
            op = self.producers.get(operand)
            if op is None or not room or op.results[0].type.size > _LARGEST or op.primitive not in _COMPUTED:
                raise _UnknownError
            with np.errstate(all="ignore"):
                result = _COMPUTED[op.primitive](op, [self._value(o, room - 1) for o in op.operands])
            self.known[operand] = np.asarray(result, numpy_dtype(op.results[0].type.dtype))
        if self.known[operand] is None:
            raise _UnknownError
        return self.known[operand]


def _literal(operand: Literal) -> Any:
    text, dtype = operand.text, operand.type.dtype
    if dtype.startswith(("c", "key")):
        raise _UnknownError
    value: Any = text == "True" if dtype == "bool" else float(text) if "f" in dtype else int(text)
    return np.asarray(value, numpy_dtype(dtype))


def _iota(op: Operator, _: list[Any]) -> Any:
    shape, dim = op.results[0].type.shape, op.integer("dimension")
    return np.broadcast_to(np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _broadcast(op: Operator, operands: list[Any]) -> Any:
    shape, dims = op.results[0].type.shape, op.ints("broadcast_dimensions")
    line = [1] * len(shape)
    for size, dim in zip(operands[0].shape, dims, strict=True):
        line[dim] = size
    return np.broadcast_to(operands[0].reshape(line), shape)


def _divided(_: Operator, operands: list[Any]) -> Any:
    left, right = operands
    if np.issubdtype(left.dtype, np.integer):  # toward zero
        return np.sign(left) * np.sign(right) * (np.abs(left) // np.maximum(np.abs(right), 1))
    return left / right


def _selected(_: Operator, operands: list[Any]) -> Any:
    which, *cases = operands
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 and which.dtype == np.bool_ else _refused()


def _reshaped(op: Operator, operands: list[Any]) -> Any:
    return operands[0].reshape(op.results[0].type.shape) if op.attr("dimensions") is None else _refused()


def _refused() -> Any:
    raise _UnknownError


def _by(function: Callable[..., Any]) -> _Compute:
    return lambda _, operands: function(*operands)


_COMPUTED: Mapping[str, _Compute] = MappingProxyType(
    {
        "iota": _iota,
        "broadcast_in_dim": _broadcast,
        "convert_element_type": lambda _, operands: operands[0],
        "div": _divided,
        "integer_pow": lambda op, operands: operands[0] ** op.integer("y"),
        "reduce_sum": lambda op, operands: operands[0].sum(op.ints("axes"), dtype=operands[0].dtype),
        "reshape": _reshaped,
        "select_n": _selected,
        "squeeze": lambda op, operands: operands[0].reshape(op.results[0].type.shape),
        "transpose": lambda op, operands: operands[0].transpose(op.ints("permutation")),
    }
    | {name: _by(getattr(np, name)) for name in ("abs", "sign", "floor", "ceil", "sin", "cos", "exp")}
    | {
        name: _by(function)
        for name, function in (
            ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("neg", np.negative), ("rem", np.fmod),
            ("max", np.maximum), ("min", np.minimum), ("and", np.bitwise_and), ("or", np.bitwise_or),
            ("not", np.invert), ("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal),
            ("gt", np.greater), ("ge", np.greater_equal), ("copy", np.asarray),
        )
    }
)  # fmt: skip
