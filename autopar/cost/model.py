"""`CostModel`: the costs of a cluster, bundled for the planner."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autopar.cluster import Cluster, ConvolutionForm, ConvolutionRate, Curve, Device, LogicalMesh
from autopar.cost.collectives import all_reduce_tree_s, collective_s, measured_s, refill_s
from autopar.cost.compute import least_roofline_s, roofline_s
from autopar.cost.constants import Constants, Numbers, Stack, StartPrices, constants_of
from autopar.cost.kernels import KernelRates, Matrices, kernel_rates
from autopar.cost.network import NetworkRates
from autopar.cost.work import Core, KernelWork, Kind, LeastWork

#: What is at least as large the C library returns to the system when a step ends (its greatest threshold for `mmap`).
KEPT_BYTES = 32 << 20
#: How sharply the larger of two rates decides; it is the usual choice for such transitions.
_BLEND = 4
#: Bytes/s at which all cores of a host read and write its memory: half of the peak of two sockets with eight channels
#: of DDR4-3200 each. An estimate, as cluster files say nothing of it.
_HOST_MEMORY_BANDWIDTH = 2e11


@dataclass(frozen=True)
class CostModel:
    """Seconds of operators and collectives on a cluster.

    Args:
        cluster: the cluster; where its devices differ an operator takes as long as on the slowest, since the
            devices of a mesh wait for each other.
        launch_s: seconds that starting an operator costs, instead of the devices' own ``launch_s``.
        all_reduce: "ring", or "best": the faster of ring and tree, as NCCL chooses; they differ where many
            devices reduce few bytes.
        starts: of the programs of a pipeline.
        constants: instead of those of the cluster's stack (`autopar.cost.constants.constants_of`); `stack`, `rates`
            and `network` are made from them.
        stack: what the program of ``cluster.stack`` does beyond the arithmetic.
        rates: of kernels by kind of device; None where they are not known.
        network: how collectives behave between devices whose kernels are known.
    """

    cluster: Cluster
    launch_s: float | None = None
    all_reduce: Literal["ring", "best"] = "ring"
    starts: StartPrices = field(default_factory=StartPrices)
    constants: Constants | None = field(default=None, repr=False, compare=False)
    stack: Stack = field(init=False)
    rates: tuple[KernelRates | None, ...] = field(init=False)
    network: NetworkRates | None = field(init=False)

    def __post_init__(self) -> None:
        constants = self._constants
        object.__setattr__(self, "stack", constants.stack(self.cluster.stack))
        rates = tuple(kernel_rates(d, constants) for d in self.cluster.device_types)
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "network", constants.network if all(rates) else None)

    @property
    def _constants(self) -> Constants:
        return self.constants or constants_of(self.cluster.stack)

    def on(self, cluster: Cluster) -> CostModel:
        """The same on another cluster, as on that of a stage: all that was given stays."""
        return replace(self, cluster=cluster)

    def collective_s(self, kind: str, full_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh) -> float:
        """Seconds of a collective over ``axes`` of ``mesh``.

        Inside a node it is what was measured there, if anything was, see `autopar.cost.collectives`. Else where kernels
        have `rates` these are nodes of several devices, see `autopar.cost.network`; others have the ring of
        `autopar.cost.collectives.collective_s`.
        """
        span = mesh.link(axes).span
        if span is not None and span.nodes == 1:
            seconds = measured_s(kind, full_bytes, span.inside, span.intra)
            if seconds is not None:
                return seconds
        if self.network is not None and span is not None and kind not in ("collective-permute", "send"):
            return self.network.collective_s(kind, full_bytes, span)
        ring_s = collective_s(kind, full_bytes, axes, mesh)
        if kind != "all-reduce" or self.all_reduce == "ring":
            return ring_s
        return min(ring_s, all_reduce_tree_s(full_bytes, mesh.group_size(axes), mesh.link(axes)))

    @property
    def refills(self) -> bool:
        """Whether devices that wait for each other lose time besides that of their collectives."""
        return any(g.intra.refill_bandwidth is not None for g in self.cluster.groups)

    def refill_s(self, bytes: Numbers) -> Numbers:
        """Seconds beyond those of collectives that devices lose by waiting for each other, once a conversion.

        Collectives of one conversion follow each other in a row, as those that were measured.

        Args:
            bytes: of what a device holds of the value that is sent; arrays for several conversions.
        """
        return functools.reduce(np.maximum, [refill_s(bytes, g.intra) for g in self.cluster.groups])

    def operator_s(self, flops: float, bytes: float, dtype: str, *, starts: bool = True) -> float:
        """Seconds of one operator's share on one device: launch and roofline.

        Args:
            flops: FLOPs that one device does.
            bytes: bytes that one device reads and writes.
            dtype: jaxpr name of the dtype that it computes in, as ``bf16``.
            starts: whether it starts a kernel of its own.

        Returns:
            0 for an operator that neither computes nor moves anything.
        """
        if not flops and not bytes:
            return 0.0
        return max(
            (self._launch_s(d) if starts else 0.0) + _busy_s(flops, bytes, dtype, d, r)
            for d, r in zip(self.cluster.device_types, self.rates, strict=True)
        )

    def _launch_s(self, device: Device) -> float:
        """Seconds between two kernels; none where the host starts them one by one, ahead of the device."""
        if self.stack.start_s and self.knows_kernels:
            return 0.0
        return device.launch_s if self.launch_s is None else self.launch_s

    def product_s(self, product: Matrices, dtype: str, core: Core = "", *, backward: bool = False) -> Numbers:
        """Seconds of matrix products on one device: by their sizes where kernels have `rates`, else by the roofline.

        Args:
            product: their sizes there; arrays for several kernels.
            dtype: jaxpr name of the dtype that they compute in.
            core: of which part of attention they are: one kernel does all of it where the stack has one.
            backward: whether they are of the backward pass.
        """
        fused = bool(core) and self.stack.fused_attention
        seconds: list[Numbers] = []
        for d, r in zip(self.cluster.device_types, self.rates, strict=True):
            if r is None:
                busy_s = _rooflines_s(product.flops, 0.0 if fused else product.moved_bytes, dtype, d)
            elif fused:
                kernel = self._constants.attention_of(self.stack.attention_kernel, d.kind)
                busy_s = r.attention_s(product, dtype, d, kernel, backward=backward, causal=core == "causal")
            else:
                busy_s = r.product_s(product, dtype, d, misaligned=product.misaligned, moved=product.moved_bytes)
            seconds.append(self._launch_s(d) + busy_s)
        return functools.reduce(np.maximum, seconds)

    def moved_s(self, bytes: Numbers, starts: Numbers, core: Core = "") -> Numbers:
        """Seconds of operators that memory limits, on one device.

        Args:
            bytes: read and written there; arrays for several kernels.
            starts: whether each starts a kernel (1) or is part of another (0).
            core: of which part of attention they are; scores are never written where the stack has a kernel for it.
        """
        if core and self.stack.fused_attention:
            return 0.0 * bytes
        moved = bytes * (self.stack.core_traffic if core else self.stack.traffic)
        pairs = zip(self.cluster.device_types, self.rates, strict=True)
        seconds = [
            self._launch_s(d) * starts + (_rooflines_s(0.0, moved, "f32", d) if r is None else r.memory_s(moved, d))
            for d, r in pairs
        ]
        return functools.reduce(np.maximum, seconds)

    @property
    def overlaps(self) -> bool:
        """Whether collectives overlap computation: the stack starts them so, on devices whose kernels are known."""
        return self.knows_kernels and self.stack.asynchronous

    @property
    def awaited_share(self) -> float:
        """Share of a send between stages that its sender awaits: the stack's, on devices whose kernels are known."""
        return 1 - self.stack.pp_overlap if self.knows_kernels and not self.stack.asynchronous else 0.0

    @property
    def computes_while_sending(self) -> bool:
        """Whether a device computes while it sends to a neighbour: those of `overlaps`, and TPUs."""
        return self.overlaps or self._tpus

    @staticmethod
    def combined(sizes: Sequence[float], limit: float) -> list[float]:
        """Bytes of the messages in which gradients or parameters are sent that are ready one after the other.

        Args:
            sizes: bytes of each.
            limit: bytes up to which those that follow each other go together, as ``combine_bytes`` of the stack.
        """
        together: list[float] = []
        for bytes in sizes:
            if together and together[-1] + bytes <= limit:
                together[-1] += bytes
            else:
                together.append(bytes)
        return together

    def exposed_share(self, *, of_state: bool) -> float:
        """Share of a collective's seconds, 0 to 1, that no computation hides, in a stack that states such shares.

        Args:
            of_state: whether it is a collective of gradients or parameters; else it is of activations.
        """
        return 1 - (self.stack.dp_overlap if of_state else self.stack.tp_overlap)

    def start_s(self, *, backward: bool) -> float:
        """Seconds of the host to start one kernel of the backward pass, or of another; 0 in compiled programs."""
        if not self.knows_kernels:
            return 0.0
        return self.stack.start_backward_s if backward else self.stack.start_s

    @staticmethod
    def together_s(device_s: float, host_s: float) -> float:
        """Seconds of work that a device does while the host starts it: the larger, and more where they are close.

        Kernels differ in size, so some wait for the host while the host waits for others.
        """
        if not host_s:
            return device_s
        return float((device_s**_BLEND + host_s**_BLEND) ** (1 / _BLEND))

    @property
    def knows_kernels(self) -> bool:
        """Whether products are priced by their sizes, and collectives by theirs."""
        return all(r is not None for r in self.rates)

    @property
    def fuses(self) -> bool:
        """Whether kernels are priced by what they read from memory, and operators that are fused start none.

        So it is where kernels are known, and on TPUs, whose compiler fuses as that for GPUs does. Figures of CPUs were
        measured operator by operator.
        """
        return self.knows_kernels or self._tpus

    @property
    def halves_products(self) -> bool:
        """Whether what products alone read is converted to half width before it is sent, as XLA for TPUs does.

        TPUs multiply in bf16 where no precision is asked for. A gather, an all-to-all or a permute then sends bf16;
        what is a partial sum is added up in float32 first.
        """
        return self._tpus

    @property
    def fuses_products(self) -> bool:
        """Whether elementwise operators are computed inside of the product that reads them, as XLA for TPUs does.

        What such operators make of a stored value is then made again in the backward pass, and only that value waits.
        """
        return self._tpus

    def stacking_s(self, bytes: Numbers, moves: int) -> Numbers:
        """Seconds of one trip of a loop for a slice of a stack, beyond the kernels that make or read it.

        XLA for GPUs fills the stack of a loop's results with zeros, one move. A value that the body reads as well is
        copied into it, two more. A slice of an operand that a product reads is copied out, two moves: libraries take
        whole arrays. Others read and write slices where they lie.

        Args:
            bytes: of the slice, on one device.
            moves: times that they are read or written.
        """
        if not (self.knows_kernels and self.stack.copies_stacks):
            return 0.0 * bytes
        return self.moved_s(bytes * moves, float(moves > 1))

    @property
    def _tpus(self) -> bool:
        return all(any(k.startswith("TPU") for k in d.jax_kinds) for d in self.cluster.device_types)

    def work_s(self, work: KernelWork, parts: int = 1) -> float:
        """Seconds of one of ``parts`` equal parts of an operator on one device, with what its own kind of work adds.

        Args:
            work: the whole operator's.
            parts: devices that share it.
        """
        if self.knows_kernels and (work.core or self.stack.traffic != 1.0):
            starts = float(not work.fused and bool(work.flops or work.bytes))
            flops_s = self.operator_s(work.flops / parts, 0.0, work.dtype, starts=bool(starts))
            return max(flops_s, float(self.moved_s(work.bytes / parts, starts, work.core)))
        special = [self._special_s(work, parts, d) for d in self.cluster.device_types]
        flops, bytes = work.flops / parts, work.bytes / parts
        kinds = work.kind and any(d.convolutions or _efficiency(work.kind, d) for d in self.cluster.device_types)
        if not any(special) and not kinds:
            return self.operator_s(flops, bytes, work.dtype, starts=not (work.fused and self.fuses))
        return max(
            (d.launch_s if self.launch_s is None else self.launch_s) + _kind_s(work, flops, bytes, d) + more_s
            for d, more_s in zip(self.cluster.device_types, special, strict=True)
        )

    @property
    def measures_convolutions(self) -> bool:
        """Whether convolutions are priced by their sizes on one device."""
        return any(d.convolutions for d in self.cluster.device_types)

    def least_s(self, work: LeastWork, parts: float) -> float:
        """Lower bound of an operator's seconds on each device, where it is split in at most so many parts.

        Of devices that differ the fastest counts. The seconds fall with ``parts``; times ``parts`` they rise.

        Args:
            work: the whole operator's.
            parts: devices times microbatches that share it, at most; some may do the same.
        """
        if not work.flops and not work.bytes:
            return 0.0
        pairs = list(zip(self.cluster.device_types, self.rates, strict=True))
        return min(self._least_s(work, parts, dtype, d, r) for d, r in pairs for dtype in work.dtypes)

    def _least_s(self, work: LeastWork, parts: float, dtype: str, device: Device, rates: KernelRates | None) -> float:
        launch_s = self._launch_s(device) if work.starts else 0.0
        if rates is None:
            forms: tuple[ConvolutionForm, ...] = (work.form, "loop")
            known = [_convolution_rate(work.kind, work.spatial_dims, form, device) for form in forms]
            each_s = [
                r.multiplication_s * (work.met_share if r.form == "loop" else 1.0) for r in known if r is not None
            ]
            if each_s:
                return launch_s + min(each_s) * work.flops / 2 / parts
            kind = _efficiency(work.kind, device)
            return launch_s + least_roofline_s(work.flops, work.bytes, dtype, device, parts, kind)
        if work.product is not None and self.knows_kernels:
            return launch_s + rates.least_product_s(work.product, dtype, device, parts, work.aligned)
        traffic = min(1.0, self.stack.traffic, self.stack.core_traffic)
        return launch_s + _busy_s(work.flops / parts, traffic * work.bytes / parts, dtype, device, rates)

    def _special_s(self, work: KernelWork, parts: int, device: Device) -> float:
        """Seconds of functions, short sums and bringing operands into another order, as far as the device tells."""
        seconds = work.elements / parts * dict(device.function_s).get(work.function, 0.0)
        if device.reorder_efficiency is not None:
            for bytes, stride_bytes in work.reordered:
                if stride_bytes:
                    reached = device.memory_bandwidth * device.reorder_efficiency.at(stride_bytes)
                    seconds += bytes / parts / reached
                else:  # whole runs are copied
                    seconds += roofline_s(0.0, 2 * bytes / parts, work.dtype, device)
        if device.reduction_efficiency is not None and work.run_bytes:
            read = work.bytes / parts
            reached = device.memory_bandwidth * device.reduction_efficiency.at(work.run_bytes)
            seconds += max(0.0, read / reached - roofline_s(0.0, read, work.dtype, device))
        return seconds

    def first_touch_s(self, bytes: float) -> float:
        """Seconds that the first writing of a step's temporaries takes longer than later ones.

        Args:
            bytes: of one device's temporaries. Little memory is kept by the process from step to step: of less than
                `KEPT_BYTES` nothing is new.
        """
        rates = [d.first_touch_bandwidth for d in self.cluster.device_types if d.first_touch_bandwidth is not None]
        return max((bytes / r for r in rates), default=0.0) if bytes >= KEPT_BYTES else 0.0

    def host_memory_s(self, bytes: float) -> float:
        """Seconds in which a host reads and writes, of each of its devices, ``bytes`` of its own memory."""
        return max(g.devices_per_node * bytes / _HOST_MEMORY_BANDWIDTH for g in self.cluster.groups)

    def device_memory_s(self, bytes: float) -> float:
        """Seconds in which a device reads and writes ``bytes`` of its memory."""
        return max(bytes / g.device.memory_bandwidth for g in self.cluster.groups)

    def host_s(self, bytes: float) -> float:
        """Seconds of moving what one device holds to the memory of its host, or back: launch and the host's link.

        Args:
            bytes: bytes that one device moves; all devices move as many at the same time.

        Returns:
            0 for no bytes; inf where some nodes of the cluster have no ``host_bandwidth``.
        """
        if not bytes:
            return 0.0
        return max(
            (g.device.launch_s if self.launch_s is None else self.launch_s) + bytes / g.host_bandwidth
            if g.host_bandwidth is not None
            else math.inf
            for g in self.cluster.groups
        )


def _busy_s(flops: float, bytes: float, dtype: str, device: Device, rates: KernelRates | None) -> float:
    if rates is None:
        return roofline_s(flops, bytes, dtype, device)
    return max(flops / (device.flops(dtype) * rates.best_share), float(rates.memory_s(bytes, device)))


def _rooflines_s(flops: Numbers, bytes: Numbers, dtype: str, device: Device) -> Numbers:
    """`roofline_s` of each of several operators."""
    each = np.broadcast_arrays(np.asarray(flops, float), np.asarray(bytes, float))
    seconds = [roofline_s(float(f), float(b), dtype, device) for f, b in zip(each[0].flat, each[1].flat, strict=True)]
    return np.array(seconds).reshape(each[0].shape)


def _efficiency(kind: Kind, device: Device) -> Curve | None:
    """The curve of what the device reaches in work of this kind; None for its common one."""
    if kind == "kernel gradient" and device.kernel_gradient_efficiency is not None:
        return device.kernel_gradient_efficiency
    return device.convolution_efficiency if kind else None


def _kind_s(work: KernelWork, flops: float, bytes: float, device: Device) -> float:
    """Busy seconds of the part on one device, of which ``work`` has the sizes where it is a convolution."""
    if work.convolution is not None:
        rate = _convolution_rate(work.kind, work.convolution.spatial_dims, work.convolution.form, device)
        if rate is not None:
            return work.convolution.seconds(rate)
    return roofline_s(flops, bytes, work.dtype, device, _efficiency(work.kind, device))


def _convolution_rate(kind: Kind, spatial_dims: int, form: ConvolutionForm, device: Device) -> ConvolutionRate | None:
    """The measured rate of the fewest dims that are enough, else of the most; None where none was measured.

    Where the form was not measured, that of windows counts. Loops have one rate for all kinds of convolutions; other
    operators, whose kind is "", have none.
    """
    if not kind:
        return None
    every = [r for r in device.convolutions if r.form == form and (form == "loop" or r.kind == kind)]
    every = every or [r for r in device.convolutions if r.form == "windows" and r.kind == kind]
    rates = sorted(every, key=lambda r: r.spatial_dims)
    return next((r for r in rates if r.spatial_dims >= spatial_dims), rates[-1] if rates else None)
