"""`TensorType`: shape and dtype of a value, without jax."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def item_bytes(dtype: str) -> float:
    """Bytes of one element of ``dtype``: 4 for ``f32``, 8 for a threefry key, 1 for any ``f8_*``."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, 16)
    if dtype.startswith("f8_"):
        return 1
    if dtype.startswith("f4_"):
        return 0.5
    return 0  # tokens and other values that hold no data


def is_float(dtype: str) -> bool:
    """Whether sums of ``dtype`` may be taken in any order, up to rounding (floats and complex)."""
    return dtype.startswith(("f", "bf", "c"))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements by dim) and dtype (jaxpr name, as ``bf16``) of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.ceil(self.size * item_bytes(self.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
