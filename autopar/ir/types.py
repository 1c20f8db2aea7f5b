"""`TensorType`: shape and dtype of a value, without jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.errors import TraceError

# Bytes an element by dtype name; names are those that jaxprs print.
_ITEM_BYTES: dict[str, float] = {
    "bool": 1,
    "i2": 0.25,
    "i4": 0.5,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u2": 0.25,
    "u4": 0.5,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "c64": 8,
    "c128": 16,
}
_KEY_BYTES: dict[str, int] = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
#: Values that order effects, and tangents of integers: they hold no data.
_WITHOUT_DATA = ("token", "[('float0', 'V')]")


def item_bytes(dtype: str) -> float:
    """Bytes of one element of ``dtype``: 4 for ``f32``, 8 for a threefry key, 1 for any ``f8_*``, 0 for a token.

    Raises:
        TraceError: no size is known for ``dtype``.
    """
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, 16)
    if dtype.startswith("f8_"):
        return 1
    if dtype.startswith("f4_"):
        return 0.5
    if dtype in _WITHOUT_DATA:
        return 0
    raise TraceError(
        f"a value has elements of the dtype {dtype!r}, whose size autopar does not know",
        cause="a dtype that is newer than this release, or a plan that was changed by hand",
        remedy="cast the value to a dtype of numpy, bfloat16, an 8-bit or a 4-bit float inside the function",
    )


def has_zero(dtype: str) -> bool:
    """Whether ``dtype`` has a zero, which devices hold of a partial sum: scales of 8 bits are powers of two alone."""
    return dtype != "f8_e8m0fnu"


def is_float(dtype: str) -> bool:
    """Whether sums of ``dtype`` may be taken in any order, up to rounding (floats and complex)."""
    return dtype.startswith(("f", "bf", "c"))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements by dim) and dtype (jaxpr name, as ``bf16``) of a value.

    Its ``size``, the number of elements, and ``nbytes``, the bytes of the whole tensor, are computed once: a statement
    of a problem reads them a hundred times for each operator.

    Raises:
        TraceError: no size is known for the dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    size: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "nbytes", math.ceil(size * item_bytes(self.dtype)))

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
