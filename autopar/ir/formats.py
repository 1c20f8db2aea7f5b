"""`WireFormat`: in which bits the elements of a tensor are sent, without jax.

    integers, 8-bit floats:   blocks * (block * q + 32) bits of elements that lie in blocks with a float32 scale each
    bf16:                     16 bits an element

Blocks are filled up to their size; short tensors are one block. `autopar.transforms.formats` encodes and decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from autopar.errors import AutoparError

#: Bits an element of formats with scales.
CODE_BITS = MappingProxyType({"int8": 8, "int4": 4, "f8_e4m3": 8, "f8_e5m2": 8, "sign": 1})

#: Names of the formats.
FORMATS = ("bf16", "f8_e4m3", "f8_e5m2", "int8", "int4", "sign")

_SCALE_BYTES = 4


@dataclass(frozen=True)
class WireFormat:
    """A way of writing tensors in fewer bits.

    Args:
        name: one of `FORMATS`.
        block: elements of the last dim that share a scale.

    Raises:
        AutoparError: there is no such format, or no such block.
    """

    name: str
    block: int = 256

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise AutoparError(f"{self.name!r} is not a wire format", remedy=f"one of {', '.join(FORMATS)}")
        if self.block < 8 or self.block % 8:
            raise AutoparError(f"block={self.block} is not a block size", remedy="give a multiple of 8, as 256")

    @property
    def text(self) -> str:
        """Name and block, as ``int8/256``; `parse` reads it."""
        return f"{self.name}/{self.block}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a format from `text`."""
        name, _, block = text.partition("/")
        return cls(name, int(block))

    def bits(self, elements: int) -> float:
        """Bits an element that a last dim of ``elements`` takes, scales and filling in them."""
        if self.name == "bf16":
            return 16.0
        block, blocks = self.blocks(elements)
        return blocks * (block * CODE_BITS[self.name] + 8 * _SCALE_BYTES) / elements

    def blocks(self, elements: int) -> tuple[int, int]:
        """(elements a block, blocks) of a last dim of ``elements``; short ones are one block."""
        block = min(self.block, -(-elements // 8) * 8)
        return block, -(-elements // block)

    def message_bytes(self, elements: int) -> int:
        """Bytes of a message of ``elements``, codes and scales together; 0 of none."""
        return round(self.bits(elements) * elements / 8) if elements else 0
