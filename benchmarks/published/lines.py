"""The lines of a bill by where they belong, to a layer, the ends of the model or the update, and their seconds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost import Core, CostModel, Matrices
from benchmarks.published.bill import Bill, Kernel
from benchmarks.published.plans import LAYERS, MICROBATCHES

Array = NDArray[np.float64]
Section = Literal["layer", "first", "last"]
Phase = Literal["forward", "backward", "recompute", "sum", "update"]

#: In the names of what the backward pass recomputes.
RECOMPUTED = "rematted_computation"


@dataclass(frozen=True)
class Lines:
    """Kernels of one section and phase, of one part of attention or of none, as columns.

    Args:
        core: of the kernels.
        product_counts: how often each product runs in a microbatch (or a step) and layer.
        products: their sizes.
        counts: the same of operators that memory limits.
        bytes: that these read and write.
        starts: 1 for those that start a kernel.
    """

    core: Core
    product_counts: Array
    products: Matrices
    counts: Array
    bytes: Array
    starts: Array

    @functools.cached_property
    def kernels(self) -> float:
        """Kernels that are started."""
        return float(np.sum(self.product_counts) + np.sum(self.counts * self.starts))

    def seconds(self, cost: CostModel, dtype: str, *, backward: bool) -> float:
        """Seconds on one device.

        Args:
            cost: what things cost under the program that ran.
            dtype: jaxpr name of the dtype of products.
            backward: whether they are of the backward pass.
        """
        products = cost.product_s(self.products, dtype, self.core, backward=backward)
        moved = cost.moved_s(self.bytes, self.starts, self.core)
        return float(np.sum(self.product_counts * products) + np.sum(self.counts * moved))


def section_of(id: str, shapes: Sequence[Sequence[int]], primitive: str = "") -> Section:
    """Where a line belongs: to a layer, or to the first or the last stage."""
    if id.count("/body/") >= 2 or any(s and s[0] == LAYERS for s in shapes):
        return "layer"
    return "first" if primitive in ("gather", "scatter-add", "scatter_add", "scatter") else "last"


def phase_of(kernel: Kernel, *, traced: bool = False) -> Phase | None:
    """The phase of a line; None of what programs do otherwise: stacks say what adding gradients up moves.

    With ``traced`` nothing is done otherwise: every microbatch converts parameters and adds gradients up ("sum").
    """
    if _accumulates(kernel):
        return "sum" if traced else None
    if not traced and _is_master_copy(kernel):  # once a step, with the update
        return "update" if kernel.phase == "forward" else None
    if "/body/" not in kernel.id:
        return "update"
    if RECOMPUTED in kernel.id:
        return "recompute"
    return "backward" if kernel.phase == "backward" else "forward"


def _accumulates(kernel: Kernel) -> bool:
    """Whether a line adds a microbatch's gradients to those of the others: in the loop, in neither pass."""
    _, inside, last = kernel.id.rpartition("/body/")
    return bool(inside) and kernel.id.count("/body/") == 1 and "jvp(" not in last


def _is_master_copy(kernel: Kernel) -> bool:
    """Whether a line converts a parameter or its gradient."""
    inside = kernel.id.count("/body/")
    return kernel.primitive == "convert_element_type" and inside > 1 and all(len(s) <= 2 for s in kernel.shapes)


@functools.cache
def lines(whole: Bill, traced: bool = False) -> dict[tuple[Section, Phase], tuple[Lines, ...]]:
    """The lines of a bill by section and phase; ``traced`` as in `phase_of`."""
    found: dict[tuple[Section, Phase], dict[Core, list[Kernel]]] = {}
    for kernel in whole.kernels:
        phase = phase_of(kernel, traced=traced)
        if phase is not None:
            section = section_of(kernel.id, kernel.shapes, kernel.primitive)
            found.setdefault((section, phase), {}).setdefault(kernel.core, []).append(kernel)
    return {
        key: tuple(_columns(core, kernels, key[0]) for core, kernels in by_core.items())
        for key, by_core in found.items()
    }


def _columns(core: Core, kernels: Sequence[Kernel], section: Section) -> Lines:
    products = [(k, k.product) for k in kernels if k.product is not None]
    others = [k for k in kernels if k.product is None and k.bytes]
    sizes = np.array([(p.batch, p.m, p.n, p.k, p.width, p.elements) for _, p in products], float).reshape(-1, 6).T
    return Lines(
        core,
        np.array([_count(k, section) for k, _ in products]),
        Matrices(*sizes),
        np.array([_count(k, section) for k in others]),
        np.array([k.bytes for k in others], float),
        np.array([float(not k.fused) for k in others]),
    )


def _count(kernel: Kernel, section: Section) -> float:
    """Times of a line in a microbatch, or in a step, of one layer where it is of layers."""
    count = kernel.count / (MICROBATCHES if "/body/" in kernel.id else 1)
    return count / LAYERS if section == "layer" else count
