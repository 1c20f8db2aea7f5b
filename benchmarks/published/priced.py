"""Seconds of a published run from the bill of its plan.

The lines of a bill belong to a layer, to the ends of the model, or to the step; each to the forward pass, the backward
pass or the update. A stage has so many layers, and the ends it has; its schedule makes a step of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, Device
from autopar.cost.constants import Constants, Stack
from autopar.cost.kernels import KernelRates
from autopar.cost.transformer.pipeline import StageTime
from autopar.cost.transformer.plan import TrainingPlan
from autopar.cost.transformer.spec import TransformerSpec
from autopar.cost.transformer.stages import StageShape
from autopar.cost.transformer.step import LayerTime, StepModel, StepPrediction, together_s
from autopar.search.intra import Bill, Kernel, Message
from benchmarks.published.plans import LAYERS, MICROBATCHES, bill, shape_of, stage_cluster

Array = NDArray[np.float64]
Section = Literal["layer", "first", "last"]
Phase = Literal["forward", "backward", "update"]

#: In the names of what the backward pass recomputes.
_RECOMPUTED = "rematted_computation"
#: Products of attention's backward pass in flash attention, over those that keep the scores: they are made again.
_FLASH_BACKWARD = 5 / 4
#: Half of the scores is masked.
_CAUSAL = 0.5


@dataclass(frozen=True)
class Lines:
    """Kernels of one section and phase as columns, each line once a microbatch (or a step) and layer.

    Args:
        counts: how often.
        products: rows of flops, result elements, depth, moved bytes, width-misaligned (0 or 1), core (0 or 1); by line.
        bytes: of operators that are no products.
        core: whether they belong to the attention core.
        starts: whether they start a kernel.
    """

    product_counts: Array
    products: Array
    counts: Array
    bytes: Array
    core: Array
    starts: Array


def section_of(id: str, shapes: Sequence[Sequence[int]], primitive: str = "") -> Section:
    """Where a line belongs: to a layer, or to the first or the last stage."""
    if id.count("/body/") >= 2 or any(s and s[0] == LAYERS for s in shapes):
        return "layer"
    return "first" if primitive in ("gather", "scatter-add", "scatter_add", "scatter") else "last"


def _per(kernel: Kernel, section: Section) -> float:
    """Times of a line in a microbatch, or in a step, of one layer where it is of layers."""
    inside = kernel.id.count("/body/")
    count = kernel.count / (MICROBATCHES if inside else 1)
    return count / LAYERS if section == "layer" else count


@functools.cache
def lines(whole: Bill, seq: int) -> dict[tuple[Section, str, bool], Lines]:
    """Lines by section, phase, and whether they are run for every microbatch."""
    found: dict[tuple[Section, str, bool], list[Kernel]] = {}
    for kernel in whole.kernels:
        section = section_of(kernel.id, kernel.shapes, kernel.primitive)
        if _is_master_copy(kernel):
            continue
        phase = kernel.phase if "/body/" in kernel.id else "update"
        if _RECOMPUTED in kernel.id:
            phase = "recompute"
        found.setdefault((section, phase, "/body/" in kernel.id), []).append(kernel)
    return {key: _columns(kernels, key[0], seq) for key, kernels in found.items()}


def _is_master_copy(kernel: Kernel) -> bool:
    """Whether a line converts a parameter or its gradient, which programs do once a step, with the update."""
    inside = kernel.id.count("/body/")
    return kernel.primitive == "convert_element_type" and inside > 1 and all(len(s) <= 2 for s in kernel.shapes)


def _columns(kernels: Sequence[Kernel], section: Section, seq: int) -> Lines:
    products = [k for k in kernels if k.product is not None]
    others = [k for k in kernels if k.product is None and (k.bytes or k.seconds)]
    columns = [
        (p.flops, p.batch * p.m * p.n, p.k, p.moved_bytes, float(p.misaligned), float(p.batch > 1))
        for p in (k.product for k in products)
        if p is not None
    ]
    return Lines(
        np.array([_per(k, section) for k in products]),
        np.array(columns).T if columns else np.zeros((6, 0)),
        np.array([_per(k, section) for k in others]),
        np.array([k.bytes for k in others]),
        np.array([float(_is_core(k, seq)) for k in others]),
        np.array([float(not k.fused) for k in others]),
    )


def _is_core(kernel: Kernel, seq: int) -> bool:
    return any(len(s) >= 4 and s[-1] == s[-2] == seq for s in kernel.shapes)


@dataclass(frozen=True)
class Pricing:
    """Prices lines on a device.

    Args:
        device: where.
        rates: how fast kernels run there.
        stack: what is fused, and what starts kernels.
        dtype: jaxpr name of the dtype of products with parameters.
    """

    device: Device
    rates: KernelRates
    stack: Stack
    dtype: str

    def seconds(self, found: Lines | None, backward: bool = False, core: bool | None = None) -> float:
        """Seconds of lines; of the attention core alone, or without it, where ``core`` says so."""
        if found is None:
            return 0.0
        return self._products_s(found, backward, core) + self._others_s(found, core)

    def _products_s(self, found: Lines, backward: bool, only: bool | None) -> float:
        flops, elements, depth, moved, misaligned, core = found.products
        rates, device, fused = self.rates, self.device, self.stack.fused_attention
        narrow = self.dtype.startswith("f8")
        wide = device.flops("bf16" if narrow else self.dtype) * rates.best_share
        best = np.where(core > 0, wide, device.flops(self.dtype) * rates.best_f8 if narrow else wide)
        waves = elements / (128 * 128 * rates.cores)
        share = rates.product_share * waves / (waves + rates.half_waves) * depth / (depth + rates.half_depth)
        share = share * np.where(misaligned > 0, rates.misaligned_share, 1.0)
        done = flops * np.where((core > 0) & fused, _CAUSAL * (_FLASH_BACKWARD if backward else 1.0), 1.0)
        limit = moved / (device.memory_bandwidth * rates.memory_share) * np.where((core > 0) & fused, 0.0, 1.0)
        each = np.maximum(done / (best * share), limit)
        return float(np.sum(found.product_counts * each * _chosen(core, only)))

    def _others_s(self, found: Lines, only: bool | None) -> float:
        stack = self.stack
        # What XLA fuses is in the bill; other programs move so many times its bytes.
        own = 1.0 if stack.asynchronous else stack.core_traffic
        core = 0.0 if stack.fused_attention else own
        moved = found.bytes * np.where(found.core > 0, core, stack.traffic)
        each = moved / (self.device.memory_bandwidth * self.rates.memory_share)
        if not stack.layer_forward_s:  # compiled: kernels follow each other
            each = each + self.device.launch_s * found.starts
        return float(np.sum(found.counts * each * _chosen(found.core, only)))


def _chosen(core: Array, only: bool | None) -> Array:
    return np.ones_like(core) if only is None else core if only else 1.0 - core


@dataclass(frozen=True)
class PlanStep(StepModel):
    """The costs of a run whose plan has a bill.

    Args:
        whole: the bill.
    """

    whole: Bill

    @functools.cached_property
    def pricing(self) -> Pricing:
        """Prices of lines."""
        timer = self.timer
        return Pricing(timer.device, timer.rates, self.stack, self.spec.dtype)

    def _lines(self, section: Section, phase: str, each: bool = True) -> Lines | None:
        return lines(self.whole, self.spec.seq).get((section, phase, each))

    @functools.cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Ranks and stride of the groups along each mesh axis."""
        plan = self.plan
        shape = shape_of(self.spec, plan)
        sized = [("dp", shape.dp), ("cp", plan.cp), ("tp", plan.tp)]
        names = dict(zip("xyzw", [role for role, n in sized if n > 1], strict=False))
        together = plan.pp if plan.stages_together else 1
        places = {"tp": (plan.tp, 1), "cp": (plan.cp, plan.tp), "dp": (plan.dp, plan.tp * plan.cp * together)}
        return {name: places[role] for name, role in names.items()}

    def message_s(self, m: Message, share: float = 1.0) -> float:
        """Seconds of a collective of a share of a message's bytes."""
        groups = [self.axes[a] for a in m.axes.split("+")]
        ranks, stride = math.prod(n for n, _ in groups), min(s for _, s in groups)
        if m.kind in ("collective-permute", "send"):
            return self.network.send_s(m.bytes * share, stride, self.network.devices_per_node)
        return self.network.collective_s(m.kind, m.bytes * share, ranks, stride)

    def _messages(self, roles: Iterable[str], phase: str | None, each: bool) -> list[Message]:
        """Messages over the axes of some roles alone, of a phase, inside of the loop over microbatches or outside."""
        strides = {"tp": 1}
        inner = {name for name, (n, s) in self.axes.items() if s == strides["tp"] and self.plan.tp > 1}
        wanted = set(roles)
        return [
            m
            for m in self.whole.messages
            if ("tp" if set(m.axes.split("+")) <= inner else "dp") in wanted
            and ("/body/" in m.consumer) == each
            and (phase is None or m.phase == phase)
        ]

    def tensor_s(self, phase: str) -> float:
        """Seconds of one layer's tensor-parallel collectives of one pass."""
        full = self.plan.recompute == "full"
        found = (
            m
            for m in self._messages(["tp"], phase, True)
            if m.consumer.count("/body/") >= 2 and (full or _RECOMPUTED not in m.consumer)
        )
        return sum(m.count * self.message_s(m) for m in found) / (MICROBATCHES * LAYERS)

    def layer(self) -> LayerTime:
        """One layer of one microbatch: what kernels and collectives take, or the host to start them if that is more."""
        plan, stack, price = self.plan, self.stack, self.pricing
        forward_s = price.seconds(self._lines("layer", "forward"))
        back_s = price.seconds(self._lines("layer", "backward"), True)
        if plan.recompute == "selective" and not stack.fused_attention:
            back_s += price.seconds(self._lines("layer", "recompute"), core=True)
        elif plan.recompute == "full":
            # Compilers leave out what nothing reads; other programs run the whole layer again.
            back_s += price.seconds(self._lines("layer", "recompute")) if stack.asynchronous else forward_s
        wait_s = 2 * stack.wait_s if plan.tp > 1 else 0.0
        hidden = (1 - stack.tp_overlap) / stack.link_share
        moved_s, moved_back_s = (self.tensor_s(p) * hidden + wait_s for p in ("forward", "backward"))
        collectives = (2 if plan.tp > 1 else 0) * (2 if plan.sequence_parallel else 1)
        straggle_s = collectives * math.log2(plan.tp) * stack.collective_s
        again = plan.recompute == "full"
        host_back_s = stack.layer_backward_s + straggle_s + (stack.layer_forward_s + straggle_s if again else 0.0)
        layer_forward_s = together_s(forward_s + moved_s, stack.layer_forward_s + straggle_s)
        layer_backward_s = together_s(back_s + moved_back_s + (wait_s if again else 0.0), host_back_s)
        return LayerTime(layer_forward_s, layer_backward_s, self._weights_s())

    def _weights_s(self) -> float:
        """Seconds of the products that make gradients of parameters: a third of those of the dense products."""
        price, found = self.pricing, self._lines("layer", "forward")
        return 0.0 if found is None else price._products_s(found, False, False)

    def stage(self, stage: StageShape, layer: LayerTime) -> StageTime:
        """One microbatch on one stage."""
        stack, price = self.stack, self.pricing
        forward_s = stage.layers * layer.forward_s + stack.microbatch_s / 3
        backward_s = stage.layers * layer.backward_s + stack.microbatch_s * 2 / 3
        ends: list[Section] = [*["first"] * stage.first, *["last"] * stage.last]  # type: ignore[list-item]
        for end in ends:
            forward_s += price.seconds(self._lines(end, "forward"))
            backward_s += price.seconds(self._lines(end, "backward"), True)
        elements = self.elements(stage)
        backward_s += self.timer.bytes_s(
            (stack.partition_bytes if self.plan.zero else stack.accumulate_bytes) * elements
        )
        return StageTime(forward_s, backward_s, stage.layers * layer.weights_s, self.sends_s(stage))


def plan_step(
    spec: TransformerSpec, plan: TrainingPlan, cluster: Cluster, constants: Constants, stack: str
) -> PlanStep:
    """The costs of a run by the bill of its plan; memory by the formula.

    Args:
        spec: the model.
        plan: how it is trained.
        cluster: where.
        constants: of kernels, networks and stacks.
        stack: name of the training program among them.

    Raises:
        InfeasiblePlanError: the plan does not suit the model.
    """
    plan.check(spec)
    shape = shape_of(spec, plan)
    whole = bill(shape, stage_cluster(cluster, shape.tp * shape.dp * shape.cp))
    return PlanStep(spec, plan, cluster, constants.stack(stack), constants, whole)


def predict_plan(
    spec: TransformerSpec, plan: TrainingPlan, cluster: Cluster, constants: Constants, stack: str
) -> StepPrediction:
    """Seconds and bytes of a step; arguments and errors are those of `plan_step`."""
    return plan_step(spec, plan, cluster, constants, stack).predict()
