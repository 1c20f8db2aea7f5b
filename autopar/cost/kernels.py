"""Seconds of kernels on processors of many cores: products by waves, tiles and depth, others by the bytes they move.

A product of (m, k) by (k, n), ``batch`` times, reaches the best rate seen on the device times

    product_share * w / (w + half_waves) * k / (k + half_depth)

w is the number of waves of 128 x 128 tiles over the cores; a deep contraction hides the start and end of a tile.
Memory may limit it too. Operands whose rows are no multiple of 16 bytes are read slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.constants import Constants

_TILE = 128 * 128


@dataclass(frozen=True, slots=True)
class Matrices:
    """``batch`` products of (m, k) by (k, n) on one device.

    Args:
        batch, m, n, k: sizes.
        width: bytes of an element of the operands.
    """

    batch: float
    m: float
    n: float
    k: float
    width: int = 2

    @property
    def flops(self) -> float:
        """FLOPs of all of them."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        """Bytes of operands and results."""
        return self.width * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def misaligned(self) -> bool:
        """Whether a row of an operand or of the result is no multiple of 16 bytes."""
        return any(size > 1 and size * self.width % 16 for size in (self.m, self.n, self.k))


@dataclass(frozen=True, slots=True)
class KernelRates:
    """How fast kernels run on one kind of device.

    Args:
        cores: units that run tiles at the same time.
        product_share, half_waves, half_depth, misaligned_share: see this module.
        memory_share: fraction of the memory bandwidth that operators reach that memory limits.
        best_share: fraction of the peak that the best product in 16 or more bits reaches.
        best_f8: fraction of the peak that the best product in 8 bits reaches.
    """

    cores: int
    product_share: float
    half_waves: float
    half_depth: float
    misaligned_share: float
    memory_share: float
    best_share: float
    best_f8: float

    def product_s(
        self, product: Matrices, dtype: str, device: Device, *, misaligned: bool, moved: float, part: float = 1.0
    ) -> float:
        """Seconds of a product.

        Args:
            product: its sizes on one device.
            dtype: jaxpr name of the dtype that it computes in.
            device: peaks and memory bandwidth.
            misaligned: rows of an operand are no multiple of 16 bytes.
            moved: bytes that it reads and writes.
            part: of the FLOPs that is done, as half under a causal mask that is made use of.
        """
        if not product.flops:
            return self.memory_s(moved, device)
        waves = product.batch * product.m * product.n / (_TILE * self.cores)
        share = self.product_share * waves / (waves + self.half_waves) * product.k / (product.k + self.half_depth)
        if misaligned:
            share *= self.misaligned_share
        best = self.best_f8 if dtype.startswith("f8") else self.best_share
        return max(part * product.flops / (device.flops(dtype) * best * share), self.memory_s(moved, device))

    def memory_s(self, bytes: float, device: Device) -> float:
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
        k.half_waves,
        k.half_depth,
        k.misaligned_share,
        k.memory_share,
        device.compute_efficiency.points[-1][1],
        constants.best_f8_of(device.kind),
    )
