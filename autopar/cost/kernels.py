"""Seconds of kernels on processors of many cores: products by waves, tiles and depth, others by the bytes they move.

A product of (m, k) by (k, n), ``batch`` times, reaches the best rate seen on the device times

    product_share * w / (w + half_waves) * k / (k + half_depth)

w is the number of waves of 128 x 128 tiles over the cores; a deep contraction hides the start and end of a tile. Where
products of a device and a dtype were measured, the halves are theirs.

Libraries divide the depth of a product with fewer tiles than cores: into s pieces, s w <= 1, whose partial sums are
added up (Osama et al., "Stream-K", 2023, section 5.1). Each element of a partial sum costs ``partial_bytes`` of memory.
A product takes the least over s.
Memory may limit it too. Operands whose rows are no multiple of 16 bytes are read slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Device
from autopar.cost.constants import AttentionKernel, Constants, Numbers, ProductSizes

_TILE = 128 * 128
#: Instead of 0 where a quotient is taken.
_TINY = 1e-200
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
        elements: of operands and results in memory; None where they are those of the matrices. Windows of a
            convolution overlap.
        done: share of the multiplications that a kernel does; the others are by zeros between elements.
    """

    batch: Numbers
    m: Numbers
    n: Numbers
    k: Numbers
    width: Numbers = 2
    elements: Numbers | None = None
    done: Numbers = 1.0

    @property
    def flops(self) -> Numbers:
        """FLOPs of all of them."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.done

    @property
    def moved_bytes(self) -> Numbers:
        """Bytes of operands and results."""
        if self.elements is not None:
            return self.width * self.elements
        return self.width * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def times(self, count: int) -> Matrices:
        """The products of so many as one."""
        elements = None if self.elements is None else count * self.elements
        return replace(self, batch=count * self.batch, elements=elements)

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
        partial_bytes: what an element of a partial sum costs; inf where no depth is divided.
        best_share: fraction of the peak that the best product in 16 or more bits reaches.
        best_f8: fraction of the peak that the best product in 8 bits reaches.
    """

    cores: int
    product_share: float
    halves: ProductSizes
    products: tuple[tuple[str, ProductSizes], ...]
    misaligned_share: float
    memory_share: float
    partial_bytes: float
    best_share: float
    best_f8: float

    def _halves(self, dtype: str, device: Device) -> ProductSizes:
        """Sizes at which products of a dtype reach half of their best rate.

        The start and end of a tile take as long where multiplications are slower than those of f32, as without tensor
        cores: they are hidden by less depth.
        """
        measured = [sizes for name, sizes in self.products if name == dtype.partition("_x")[0]]
        if measured:
            return measured[0]
        slower = min(1.0, device.flops(dtype) / device.flops("f32"))
        return ProductSizes(self.halves.half_waves, self.halves.half_depth * slower)

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
        share = np.where(misaligned, self.misaligned_share, 1.0)
        computing = self._computing_s(product, dtype, device, share) * part
        return np.maximum(np.where(product.flops, computing, 0.0), self.memory_s(moved, device))

    def least_product_s(
        self, product: Matrices, dtype: str, device: Device, parts: float, aligned: Matrices | None = None
    ) -> float:
        """Lower bound of a product's seconds on a device that does one of ``parts``, however its dims are split.

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
        computing = self._computing_s(product, dtype, device, 1.0, parts)
        if aligned is not None:
            computing = self._computing_s(product, dtype, device, self.misaligned_share, parts)
            if math.isfinite(float(aligned.flops)):
                computing = np.minimum(computing, self._computing_s(aligned, dtype, device, 1.0, parts))
        return max(float(computing), moved_s)

    def _computing_s(
        self, product: Matrices, dtype: str, device: Device, share: Numbers, parts: float = 1.0
    ) -> NDArray[np.float64]:
        """Seconds of computing of a device that does one of ``parts``, least over what it and the others divide.

        With w waves and depth k of the whole, a of the parts along the waves and s pieces of a device's depth, r = a/s,

            seconds ~ w k / parts + half_waves half_depth + w half_depth / r + half_waves k r / parts

        and, where s > 1, the partial sums of w / r waves. 1 <= r <= parts needs no pieces; min(w, 1) <= r < 1 does.
        ``share`` is of the best rate, as of operands that are not aligned.
        """
        halves = self._halves(dtype, device)
        tiles = _TILE * self.cores
        waves, depth = np.asarray(product.batch * product.m * product.n / tiles, float), np.asarray(product.k, float)
        best = self.best_f8 if dtype.startswith("f8") else self.best_share
        wave_s = 2.0 * tiles / (device.flops(dtype) * best * self.product_share * share)  # of one wave, a depth of 1
        falling = halves.half_waves * depth / parts
        whole = self._along(waves * halves.half_depth, falling, 1.0, parts)
        if math.isfinite(self.partial_bytes):
            partial = self.memory_s(self.partial_bytes * tiles, device) / wave_s
            divided = self._along(waves * (halves.half_depth + partial), falling, np.minimum(waves, 1.0), 1.0)
            whole = np.minimum(whole, divided)
        units = waves * depth / parts + halves.half_waves * halves.half_depth + whole
        return np.asarray(wave_s * units * product.done)

    @staticmethod
    def _along(rising: Numbers, falling: Numbers, least: Numbers, most: float) -> NDArray[np.float64]:
        """The least of ``rising / r + falling * r`` for least <= r <= most."""
        r = np.clip(np.sqrt(rising / np.maximum(falling, _TINY)), np.maximum(least, _TINY), most)
        return np.asarray(rising / r + falling * r)

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
        k.partial_bytes,
        device.compute_efficiency.points[-1][1],
        constants.best_f8_of(device.kind),
    )
