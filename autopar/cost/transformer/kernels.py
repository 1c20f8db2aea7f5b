"""Seconds of matrix products and of operators that memory limits, from their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.constants import Kernels
from autopar.cost.kernels import KernelRates, Matrices
from autopar.cost.transformer.operators import Operators, Product, Sweep

_BYTES = 2  # of an element of a product's operands


@dataclass(frozen=True)
class KernelTimer:
    """Seconds of kernels on one device.

    A product reaches the device's best rate times ``product_share`` times w / (w + half_waves) times
    k / (k + half_depth): w waves of output tiles fill the cores, and a deep contraction hides the start and end
    of a tile. Memory may limit it too.

    Args:
        device: peaks, and best rate.
        kernels: how products and sweeps approach them.
        cores: units that run tiles at the same time.
        dtype: jaxpr name of the dtype of products.
        best_f8_share: fraction of the peak that the best matrix product in f8 reaches.
    """

    device: Device
    kernels: Kernels
    cores: int
    dtype: str
    best_f8_share: float

    @property
    def best_share(self) -> float:
        """Fraction of the peak that the best matrix product seen on the device reaches."""
        return self.device.compute_efficiency.points[-1][1]

    def product_s(self, product: Product) -> float:
        """Seconds of one product."""
        narrow = self.dtype.startswith("f8") and product.region != "core"
        dtype = self.dtype if narrow or not self.dtype.startswith("f8") else "bf16"
        moved = product.m * product.k + product.k * product.n + (0 if product.reads_once else product.m * product.n)
        shape = Matrices(product.batch, product.m, product.n, product.k)
        moved_bytes = _BYTES * product.batch * moved
        return self.rates.product_s(
            shape, dtype, self.device, misaligned=product.misaligned, moved=moved_bytes, part=product.share
        )

    @property
    def rates(self) -> KernelRates:
        """How fast kernels run on the device."""
        k = self.kernels
        return KernelRates(
            self.cores, k.product_share, k.half_waves, k.half_depth, k.misaligned_share, k.memory_share,
            self.best_share, self.best_f8_share,
        )  # fmt: skip

    def bytes_s(self, bytes: float) -> float:
        """Seconds to read and write ``bytes``."""
        return bytes / (self.device.memory_bandwidth * self.kernels.memory_share)

    def forward_s(self, operators: Operators) -> float:
        """Seconds of the forward pass of ``operators``."""
        return sum(map(self.product_s, operators.products)) + sum(
            self.bytes_s(o.forward_bytes) for o in operators.sweeps
        )

    def backward_s(self, operators: Operators) -> float:
        """Seconds of the backward pass of ``operators``, without recomputation."""
        products = sum(self.product_s(part) for o in operators.products for part in o.backward())
        return products + sum(self.bytes_s(o.backward_bytes) for o in operators.sweeps)

    def core_forward_s(self, operators: Operators) -> float:
        """Seconds of the forward pass of the attention core, which selective recomputation repeats."""
        products: list[Product] = [o for o in operators.products if o.region == "core"]
        sweeps: list[Sweep] = [o for o in operators.sweeps if o.region == "core"]
        return self.forward_s(Operators(tuple(products), tuple(sweeps)))
