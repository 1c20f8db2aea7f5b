"""Seconds of kernels on processors of many cores: products by waves, tiles and depth, others by the bytes they move.

A product of (m, k) by (k, n), ``batch`` times, reaches the best rate seen on the device times

    product_share * w / (w + half_waves) * k / (k + half_depth)

w is the number of waves of 128 x 128 tiles over the cores; a deep contraction hides the start and end of a tile. Where
products of a device and a dtype were measured, the halves are theirs.
Memory may limit it too. Operands whose rows are no multiple of 16 bytes are read slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Device
from autopar.cost.constants import AttentionKernel, Constants, Numbers, ProductSizes

_TILE = 128 * 128
#: Products of the backward pass of fused attention, which makes the scores again, over those that keep them.
_FUSED_BACKWARD = 5 / 4
#: Part of the scores that attention in one kernel or in blocks computes at least under a causal mask.
CAUSAL = 0.5


@dataclass(frozen=True, slots=True)
class Matrices:
    """``batch`` products of (m, k) by (k, n) on one device; of several such kernels if the sizes are arrays.

    Args:
        batch, m, n, k: sizes.
        width: bytes of an element of the operands.
    """

    batch: Numbers
    m: Numbers
    n: Numbers
    k: Numbers
    width: Numbers = 2

    @property
    def flops(self) -> Numbers:
        """FLOPs of all of them."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> Numbers:
        """Bytes of operands and results."""
        return self.width * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def misaligned(self) -> bool | NDArray[np.bool_]:
        """Whether a row of an operand or of the result is no multiple of 16 bytes."""
        odd = [(size > 1) & (size * self.width % 16 != 0) for size in (self.m, self.n, self.k)]
        return odd[0] | odd[1] | odd[2]


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Speed of kernels on one kind of device.

    Args:
        cores: units that run tiles at the same time.
        product_share, misaligned_share: see this module.
        halves: half_waves and half_depth of dtypes that were not measured.
        products: those of the others, by jaxpr name.
        memory_share: fraction of the memory bandwidth that operators reach that memory limits.
        best_share: fraction of the peak that the best product in 16 or more bits reaches.
        best_f8: fraction of the peak that the best product in 8 bits reaches.
    """

    cores: int
    product_share: float
    halves: ProductSizes
    products: tuple[tuple[str, ProductSizes], ...]
    misaligned_share: float
    memory_share: float
    best_share: float
    best_f8: float

    def _halves(self, dtype: str) -> ProductSizes:
        """Sizes at which products of a dtype reach half of their best rate."""
        return next((sizes for name, sizes in self.products if name == dtype), self.halves)

    def product_s(
        self,
        product: Matrices,
        dtype: str,
        device: Device,
        *,
        misaligned: bool | NDArray[np.bool_],
        moved: Numbers,
        part: float = 1.0,
    ) -> Numbers:
        """Seconds of a product, or of each of several.

        Args:
            product: its sizes on one device.
            dtype: jaxpr name of the dtype that it computes in.
            device: peaks and memory bandwidth.
            misaligned: rows of an operand are no multiple of 16 bytes.
            moved: bytes that it reads and writes.
            part: of the FLOPs that is done, as half under a causal mask that is made use of.
        """
        halves = self._halves(dtype)
        waves = product.batch * product.m * product.n / (_TILE * self.cores)
        # FLOPs over the share that is reached; FLOPs are a multiple of waves and depth, which may be 0.
        slowed = 2.0 * _TILE * self.cores * (waves + halves.half_waves) * (product.k + halves.half_depth)
        best = self.best_f8 if dtype.startswith("f8") else self.best_share
        rate = device.flops(dtype) * best * self.product_share
        computing = slowed / (rate * np.where(misaligned, self.misaligned_share, 1.0)) * part
        return np.maximum(np.where(product.flops, computing, 0.0), self.memory_s(moved, device))

    def least_product_s(
        self, product: Matrices, dtype: str, device: Device, parts: float, aligned: Matrices | None = None
    ) -> float:
        """Lower bound of a product's seconds on a device that does one of ``parts``, however its dims are split.

        With w waves and depth k of the whole, w / a and a k / parts on a device where a of the parts are of the waves,

            seconds ~ (w / a + half_waves) (a k / parts + half_depth),    1 <= a <= parts

        which is least at a^2 = parts w half_depth / (half_waves k). It falls with ``parts``, and times ``parts`` rises.

        Args:
            product: whole sizes.
            dtype: jaxpr name of the dtype that it computes in.
            device: peaks and memory bandwidth.
            parts: devices times microbatches, at most, that share it.
            aligned: least sizes at which rows are aligned; None where they may be so as it is.
        """
        moved_s = float(self.memory_s(product.moved_bytes / parts, device))
        if not product.flops:
            return moved_s
        slowed = self._slowed(product, dtype, parts)
        if aligned is not None:
            slowed /= self.misaligned_share
            if math.isfinite(float(aligned.flops)):
                slowed = min(slowed, self._slowed(aligned, dtype, parts))
        best = self.best_f8 if dtype.startswith("f8") else self.best_share
        return max(slowed / (device.flops(dtype) * best * self.product_share), moved_s)

    def _slowed(self, product: Matrices, dtype: str, parts: float) -> float:
        """FLOPs over the share of the best rate that is reached, on a device that does one of ``parts``."""
        halves = self._halves(dtype)
        waves, depth = float(product.batch * product.m * product.n) / (_TILE * self.cores), float(product.k)
        across = halves.half_waves * depth
        even = math.sqrt(parts * waves * halves.half_depth / across) if across else parts
        along = max(1.0, min(even, parts))  # of the waves; the rest of the depth
        return (
            2.0 * _TILE * self.cores * (waves / along + halves.half_waves) * (depth * along / parts + halves.half_depth)
        )

    def attention_s(
        self,
        product: Matrices,
        dtype: str,
        device: Device,
        kernel: AttentionKernel | None = None,
        *,
        backward: bool,
        causal: bool,
    ) -> Numbers:
        """Seconds of a product of the core of attention as part of one kernel, which keeps scores on the chip.

        The backward pass makes the scores again, four products and one (Dao et al., "FlashAttention", 2022, section
        3.1). Attention is never computed in 8 bits.

        Args:
            product: its sizes on one device.
            dtype: jaxpr name of the dtype of the program's products.
            device: peaks.
            kernel: what was measured of it there; None prices products by their sizes.
            backward: whether it is of the backward pass.
            causal: whether tiles above the diagonal are left out.
        """
        part = (_FUSED_BACKWARD if backward else 1.0) * (CAUSAL if causal else 1.0)
        wide = "bf16" if dtype.startswith("f8") else dtype
        if kernel is not None:
            tokens = np.maximum(np.maximum(product.m, product.n), product.k)
            return part * product.flops / (device.flops(wide) * kernel.share(tokens, backward=backward))
        return self.product_s(product, wide, device, misaligned=product.misaligned, moved=0.0, part=part)

    def memory_s(self, bytes: Numbers, device: Device) -> Numbers:
        """Seconds to read and write ``bytes``."""
        return bytes / (device.memory_bandwidth * self.memory_share)


def kernel_rates(device: Device, constants: Constants) -> KernelRates | None:
    """The rates of kernels on a device; None where it is not known in how many cores tiles run."""
    cores = constants.cores_of(device.kind)
    if cores is None:
        return None
    k = constants.kernels
    return KernelRates(
        cores,
        k.product_share,
        ProductSizes(k.half_waves, k.half_depth),
        tuple(sorted(constants.products_of(device.kind).items())),
        k.misaligned_share,
        k.memory_share,
        device.compute_efficiency.points[-1][1],
        constants.best_f8_of(device.kind),
    )
