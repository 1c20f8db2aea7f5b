"""Reads the attributes of one StableHLO operation into plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autopar.errors import TraceError
from autopar.frontend.stablehlo.module import type_of

_PLAIN = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}
_PREFIXES = (("ui", "uint"), ("si", "int"), ("i", "int"))
_OWN = re.compile(r"loc\(-:(\d+):\d+\)")
_FRAME = re.compile(r"([\w.<>]*)\(?([^\s()]+\.[a-z]+):(\d+):\d+")


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a module.

    Args:
        op: the MLIR operation.
        number: its position among all operations of the entry function, loops and branches included.
    """

    op: Any
    number: int

    @property
    def name(self) -> str:
        """Name with its dialect, as ``stablehlo.add``."""
        return str(self.op.operation.name)

    @property
    def place(self) -> str:
        """Place of the operation: the line that the frontend or the parser gives, else its number."""
        return location_text(self.op.location) or f"operation {self.number}"

    def has(self, name: str) -> bool:
        """Whether it has the attribute ``name``."""
        return name in self.op.attributes

    def ints(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """An attribute that is a list of numbers."""
        if not self.has(name):
            return list(default)
        attribute = self.op.attributes[name]
        if isinstance(attribute, ir.DenseI64ArrayAttr):
            return [int(n) for n in ir.DenseI64ArrayAttr(attribute)]
        return [int(n) for n in np.array(ir.DenseIntElementsAttr(attribute)).reshape(-1)]

    def pairs(self, name: str, count: int) -> list[tuple[int, int]]:
        """An attribute of ``count`` pairs; zeros where it is not there."""
        flat = self.ints(name, [0, 0] * count)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def bools(self, name: str, count: int) -> list[bool]:
        """An attribute of ``count`` truth values; false where it is not there."""
        return [bool(b) for b in ir.DenseBoolArrayAttr(self.op.attributes[name])] if self.has(name) else [False] * count

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a number."""
        return int(ir.IntegerAttr(self.op.attributes[name]).value) if self.has(name) else default

    def flag(self, name: str) -> bool:
        """An attribute that is true or false."""
        return bool(ir.BoolAttr(self.op.attributes[name]).value) if self.has(name) else False

    def word(self, name: str, default: str = "") -> str:
        """An enumeration or a string: ``DEFAULT`` of ``#stablehlo<precision DEFAULT>``."""
        return word_of(self.op.attributes[name]) if self.has(name) else default

    def precision(self) -> Any:
        """``precision_config`` as `jax.lax.Precision` names it; None where it says nothing."""
        if not self.has("precision_config"):
            return None
        words = [word_of(a).lower() for a in ir.ArrayAttr(self.op.attributes["precision_config"])]
        return None if set(words) <= {"default"} else tuple(words)

    def numbers(self, name: str, kind: str) -> Any:
        """Dimension numbers: ``kind`` is the name of their class in the StableHLO dialect."""
        return getattr(stablehlo, kind)(self.op.attributes[name])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each result."""
        return [type_of(r.type, self.place)[0] for r in self.op.results]

    @property
    def dtypes(self) -> list[Any]:
        """Dtype of each result."""
        return [dtype_of(type_of(r.type, self.place)[1], self.place) for r in self.op.results]

    def unknown(self, what: str = "") -> TraceError:
        """The error for an operation that cannot be planned."""
        return TraceError(
            f"{self.name}{' ' + what if what else ''} is not among the operations that can be planned",
            cause="the module has an operation that depends on its devices, on shapes at run time or on one library",
            remedy="export the module without it; `autopar annotate --help` lists what is read",
            source=self.place,
        )


def word_of(attribute: Any) -> str:
    """The last word of an enumeration's text, or a string."""
    if isinstance(attribute, ir.StringAttr):
        return str(ir.StringAttr(attribute).value)
    return str(attribute).rstrip(">").split()[-1].split("<")[-1]


def location_text(location: Any) -> str:
    """Origin of an operation: ``file.py:12 (function)`` of the innermost line that is in no installed package.

    The line of the module's own text where the frontend said none, or the name that it gave; "" without either.
    """
    text = str(location).replace('"', "")
    frames = [m for m in _FRAME.finditer(text) if "site-packages" not in m[2]] or list(_FRAME.finditer(text))
    if frames:
        function, path, line = frames[0][1], frames[0][2], frames[0][3]
        return f"{path.rpartition('/')[2]}:{line}" + (f" ({function})" if function not in ("", "loc", "at") else "")
    in_text = _OWN.match(text)
    return f"line {in_text[1]} of the module" if in_text else scope_text(location)


def scope_text(location: Any) -> str:
    """The name that a frontend gave to an operation: jax's name stack with the primitive; "" where there is none."""
    text = str(location).removeprefix("loc(").removesuffix(")")
    name = text.partition('"')[2].partition('"')[0] if text.startswith('"') else ""
    return "" if ".py" in name or ".mlir" in name or name == "-" else name.rstrip(":")


def dtype_of(element: str, place: str) -> Any:
    """The numpy dtype of an MLIR element type. TraceError where jax has none."""
    name = _PLAIN.get(element, "")
    if not name and element.startswith("f8E"):
        name = "float8_" + element[2:].lower()
    elif not name and element[1:].isdigit() and element.startswith("f"):
        name = "float" + element[1:]
    for short, long in _PREFIXES:
        if not name and element.startswith(short) and element[len(short) :].isdigit():
            name = long + element[len(short) :]
    try:
        return jnp.dtype(name)
    except TypeError as error:
        raise TraceError(f"jax has no dtype for {element}", source=place) from error


def constant_of(operation: Operation) -> Any:
    """The value of ``stablehlo.constant``: an array of numpy, or a scalar of it where all elements are equal."""
    attribute = operation.op.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr):
        raise operation.unknown("with data outside of the module")
    dtype = operation.dtypes[0]
    dense = ir.DenseElementsAttr(attribute)
    shape = operation.shapes[0]
    if dense.is_splat:
        element = dense.get_splat_value()
        if isinstance(element, ir.FloatAttr | ir.IntegerAttr | ir.BoolAttr):
            return np.asarray(element.value).astype(dtype)
    try:
        return np.array(dense).astype(dtype).reshape(shape)
    except (TypeError, ValueError, RuntimeError):
        return _from_text(str(dense), dtype, shape, operation)


def _from_text(text: str, dtype: Any, shape: tuple[int, ...], operation: Operation) -> Any:
    """Elements of types that numpy cannot view, as bfloat16, from their text."""
    inner = text.partition("<")[2].rpartition("> :")[0]
    items = inner.replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        width = np.dtype(f"uint{8 * dtype.itemsize}")
        values = [np.array(int(i, 16), width).view(dtype) if i.startswith("0x") else np.array(i, dtype) for i in items]
        return np.array(values, dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise operation.unknown(f"of {dtype}") from error
