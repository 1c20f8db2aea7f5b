"""Narrow formats of what is sent: codes with a scale for each block of the last dim.

    scale = max|block| / (2^(q-1) - 1);   code = round(x / scale);   |x - code * scale| <= scale / 2

An integer format sends q + 32 / block bits an element ("int8": 8.125 at blocks of 256). "sign" sends one bit an element
and ``mean|block|`` (1-bit Adam, Tang et al., ICML'21). "bf16" and the 8-bit floats are casts; the latter with a scale
that puts the largest of a block at the format's largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.formats import CODE_BITS, FORMATS, WireFormat

__all__ = ["FORMATS", "Encoded", "Format", "format_of", "mean_over_replicas"]

_INTEGERS = frozenset({"int8", "int4"})
_FLOATS = MappingProxyType({"f8_e4m3": jnp.float8_e4m3fn, "f8_e5m2": jnp.float8_e5m2})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """A tensor in a narrow format.

    Args:
        codes: ``[..., blocks, codes a block]``; of "int4" two and of "sign" eight elements lie in a byte.
        scales: ``[..., blocks]`` in float32; of "bf16" empty.
    """

    codes: Any
    scales: Any


@dataclass(frozen=True)
class Format(WireFormat):
    """A `WireFormat` that encodes and decodes."""

    @property
    def code_dtype(self) -> Any:
        """Dtype of the codes that `encode` makes; formats of less than a byte an element have several in a uint8."""
        if self.name == "bf16":
            return jnp.bfloat16
        return _FLOATS.get(self.name, jnp.int8 if self.name == "int8" else jnp.uint8)

    def bound(self, x: Any) -> Any:
        """The largest error of each element that `decode` may have after `encode` without a key: a tensor like ``x``.

        Up to the rounding of float32 itself. "sign" has none that is small: see error feedback.
        """
        x = jnp.asarray(x)
        if self.name == "bf16":
            return jnp.abs(x) * 2.0**-8
        parts = self._parts(x)
        largest = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
        if self.name in _INTEGERS:
            bound = jnp.broadcast_to(largest / (2 * _steps(self.name)), parts.shape)
        elif self.name == "sign":
            bound = largest + jnp.mean(jnp.abs(parts), axis=-1, keepdims=True) + 0 * parts
        else:
            info: Any = jnp.finfo(_FLOATS[self.name])  # type: ignore[no-untyped-call]
            scale = largest / float(info.max)
            bound = jnp.maximum(jnp.abs(parts) * float(info.eps) / 2, scale * float(info.smallest_subnormal) / 2)
        return _joined(bound, x.shape)

    def encode(self, x: Any, key: Any = None) -> Encoded:
        """``x`` in this format.

        Args:
            x: floats, of any shape but ().
            key: a random key: integers are rounded up or down at random, so that the mean is ``x`` (the error is then
                up to twice `bound`). None rounds to nearest.
        """
        if self.name == "bf16":
            return Encoded(x.astype(jnp.bfloat16), jnp.zeros((0,), jnp.float32))
        parts = self._parts(x).astype(jnp.float32)
        if self.name == "sign":
            valid = self._parts(jnp.ones(x.shape[-1:], jnp.float32))
            scales = jnp.sum(jnp.abs(parts), axis=-1) / jnp.sum(valid, axis=-1)
            return Encoded(_packed_bits(parts >= 0), scales)
        largest = jnp.max(jnp.abs(parts), axis=-1)
        top = _steps(self.name) if self.name in _INTEGERS else _largest(self.name)
        scales = largest / top
        ratio = parts / jnp.where(scales > 0, scales, 1.0)[..., None]
        if self.name in _FLOATS:
            return Encoded(ratio.astype(_FLOATS[self.name]), scales)
        rounded = jnp.round(ratio) if key is None else jnp.floor(ratio + jax.random.uniform(key, ratio.shape))
        codes = jnp.clip(rounded, -top, top).astype(jnp.int8)
        return Encoded(_packed_nibbles(codes) if self.name == "int4" else codes, scales)

    def decode(self, encoded: Encoded, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        """The tensor of ``shape`` that ``encoded`` stands for."""
        codes = encoded.codes
        if self.name == "bf16":
            return codes.astype(dtype)
        if self.name == "int4":
            codes = _nibbles(codes)
        elif self.name == "sign":
            codes = _bits(codes) * 2.0 - 1.0
        return _joined(codes.astype(jnp.float32) * encoded.scales[..., None], shape).astype(dtype)

    def rounded(self, x: Any, key: Any = None) -> Any:
        """``x`` after `encode` and `decode`."""
        return self.decode(self.encode(x, key), x.shape, x.dtype)

    def _parts(self, x: Any) -> Any:
        """``[..., blocks, block]``, filled with zeros."""
        block, blocks = self.blocks(x.shape[-1])
        fill = [(0, 0)] * (x.ndim - 1) + [(0, block * blocks - x.shape[-1])]
        return jnp.pad(x, fill).reshape(*x.shape[:-1], blocks, block)


def format_of(format: str | WireFormat | None) -> Format | None:
    """A `Format` from its name, or from what ``wire=`` takes."""
    if format is None or isinstance(format, Format):
        return format
    return Format(format) if isinstance(format, str) else Format(format.name, format.block)


def mean_over_replicas(x: Any, format: str | Format | None = None, key: Any = None) -> Any:
    """The mean of ``x`` over its first dim, each term and the result sent in ``format``; None: as it is.

    Like a quantized all-reduce: every replica reduces one chunk (an all-to-all of codes), sums are in float32, the
    means are encoded once more and gathered. In a ring every hop would round again. The error of an element is at most
    the mean of the terms' bounds plus the bound of the result.

    Args:
        x: ``[replicas, ...]``.
        format: of what is sent.
        key: for rounding at random.
    """
    narrow = format_of(format)
    if narrow is None:
        return jnp.mean(x, axis=0)
    replicas, shape = x.shape[0], x.shape[1:]
    size = int(np.prod(shape))
    chunk = -(-size // replicas)
    keys = (None, None) if key is None else tuple(jax.random.split(key))
    flat = jnp.pad(x.reshape(replicas, size), ((0, 0), (0, chunk * replicas - size)))
    chunks = flat.reshape(replicas, replicas, chunk)
    sent = narrow.encode(chunks, keys[0])
    means = jnp.mean(narrow.decode(sent, chunks.shape), axis=0)
    whole = narrow.decode(narrow.encode(means, keys[1]), means.shape)
    return whole.reshape(-1)[:size].reshape(shape).astype(x.dtype)


def _steps(name: str) -> int:
    return int(2 ** (CODE_BITS[name] - 1) - 1)


def _largest(name: str) -> float:
    """The largest number of an 8-bit float."""
    return float(jnp.finfo(_FLOATS[name]).max)  # type: ignore[no-untyped-call]


def _joined(parts: Any, shape: tuple[int, ...]) -> Any:
    """``[..., blocks, block]`` as ``shape``, without what fills the last block."""
    return parts.reshape(*parts.shape[:-2], -1)[..., : shape[-1]].reshape(shape)


def _packed_nibbles(codes: Any) -> Any:
    low, high = codes[..., 0::2], codes[..., 1::2]
    return ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8)


def _nibbles(packed: Any) -> Any:
    both = (packed.astype(jnp.int8)[..., None] << jnp.array([4, 0], jnp.int8)) >> 4
    return both.reshape(*packed.shape[:-1], -1)


def _packed_bits(bits: Any) -> Any:
    groups = bits.reshape(*bits.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(groups << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def _bits(packed: Any) -> Any:
    bits = (packed[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return bits.reshape(*packed.shape[:-1], -1).astype(jnp.float32)
