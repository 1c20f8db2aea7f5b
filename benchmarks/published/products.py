"""How sizes slow matrix products down, by published measurements of kernels, not of training runs.

``python -m benchmarks.published.products`` fits half_waves and half_depth of `autopar.cost.kernels`, and the seconds
that starting a kernel took, to every other row of ``data/products_measured.csv``, for each device and dtype, with no
depth divided. Then it fits partial_bytes to the same rows of all. It prints them with the errors of the rows between,
and with errors of these rows by the constants of all devices and with no depth divided.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import least_squares

from autopar.cluster import Cluster, Device
from autopar.cost import Matrices, kernel_rates
from autopar.cost.constants import ProductSizes, load_constants
from autopar.cost.kernels import KernelRates
from autopar.ir.types import item_bytes
from benchmarks.published.dataset import CLUSTERS, DATA
from benchmarks.report import Row, table

FILE = DATA / "products_measured.csv"


@dataclass(frozen=True)
class Products:
    """Products of one device and dtype that were measured.

    Args:
        device: its cluster file's device.
        dtype: of the operands.
        sizes: (batch, m, n, k) of each.
        seconds: of each.
    """

    device: Device
    dtype: str
    sizes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def part(self, start: int) -> Products:
        """Every other one."""
        return replace(self, sizes=self.sizes[start::2], seconds=self.seconds[start::2])

    def errors(self, rates: KernelRates, start_s: float) -> NDArray[np.float64]:
        """Logarithms of predicted over measured seconds, with ``start_s`` for the start of a kernel."""
        product = Matrices(*self.sizes.T, item_bytes(self.dtype))
        found = rates.product_s(product, self.dtype, self.device, misaligned=False, moved=product.moved_bytes)
        return np.asarray(np.log((found + start_s) / self.seconds))


def measured() -> tuple[Products, ...]:
    """All of the file, by device and dtype."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    found = []
    for name, dtype in dict.fromkeys((r["device"], r["dtype"]) for r in rows):
        of_it = [r for r in rows if (r["device"], r["dtype"]) == (name, dtype)]
        sizes = np.array([[float(r[c]) for c in ("batch", "m", "n", "k")] for r in of_it])
        rate = np.array([float(r["tflops"]) for r in of_it]) * 1e12
        device = Cluster.load(CLUSTERS[name]).groups[0].device
        found.append(Products(device, dtype, sizes, 2 * sizes.prod(1) / rate))
    return tuple(found)


def rates_of(products: Products, sizes: ProductSizes | None, partial_bytes: float = math.inf) -> KernelRates:
    """Rates of a device whose products are slowed down as ``sizes`` say; None: as those of all devices."""
    rates = kernel_rates(products.device, load_constants())
    assert rates is not None
    own = () if sizes is None else ((products.dtype, sizes),)
    return replace(rates, products=own, partial_bytes=partial_bytes)


def fit(products: Products) -> tuple[ProductSizes, float]:
    """The sizes, and seconds of a start, that are nearest to the measurements."""

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        waves, depth, start_s = np.exp(x).tolist()
        return products.errors(rates_of(products, ProductSizes(waves, depth)), start_s)

    x = least_squares(errors, np.log([0.1, 200.0, 2e-6]), loss="soft_l1", f_scale=0.05).x
    waves, depth, start_s = (float(f"{v:.3g}") for v in np.exp(x))
    return ProductSizes(waves, depth), start_s


def fit_partial_bytes(found: Sequence[Products]) -> float:
    """The bytes of an element of a partial sum that are nearest to the measurements, with sizes as `fit` has them."""
    fitted = [(products, *fit(products)) for products in found]

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        partial_bytes = float(np.exp(x[0]))
        return np.concatenate([p.errors(rates_of(p, sizes, partial_bytes), start_s) for p, sizes, start_s in fitted])

    # Written and read in float32, at least.
    x = least_squares(errors, np.log([8.0]), loss="soft_l1", f_scale=0.05).x
    return float(f"{np.exp(x[0]):.3g}")


def row(products: Products, partial_bytes: float) -> Row:
    """What is fitted to every other row, and mean errors of the others."""
    sizes, start_s = fit(products.part(0))
    held_out = products.part(1)

    def error(rates: KernelRates) -> float:
        return statistics.mean(np.abs(np.expm1(held_out.errors(rates, start_s))).tolist())

    return {
        "device": products.device.kind,
        "dtype": products.dtype,
        "products": len(products.seconds),
        "half_waves": sizes.half_waves,
        "half_depth": sizes.half_depth,
        "start_us": 1e6 * start_s,
        "held out": error(rates_of(products, sizes, partial_bytes)),
        "undivided": error(rates_of(products, sizes)),
        "as all devices": error(rates_of(products, None, partial_bytes)),
    }


def rows(found: Sequence[Products]) -> tuple[Row, ...]:
    """`row` of each."""
    partial_bytes = fit_partial_bytes([products.part(0) for products in found])
    return tuple(row(products, partial_bytes) for products in found)


if __name__ == "__main__":
    Console(width=140).print(table("measured products", rows(measured())))
    Console().print(f"partial_bytes {fit_partial_bytes([products.part(0) for products in measured()])}")
