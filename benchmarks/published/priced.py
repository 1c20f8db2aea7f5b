"""Seconds of a published run from the bill of its plan: a stage has so many layers and the ends it has.

Kernels and collectives are priced by `autopar.cost.CostModel` under the stack that ran; the schedule makes a step of
the seconds of its stages (`benchmarks.published.transformer.pipeline`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.cost.constants import Constants, Stack
from benchmarks.published.bill import BilledMessage
from benchmarks.published.kept import bill
from benchmarks.published.lines import RECOMPUTED, Lines, Phase, Section, lines, section_of
from benchmarks.published.plans import LAYERS, MICROBATCHES, RunBill, shape_of, stage_cluster
from benchmarks.published.shared import SharedState
from benchmarks.published.transformer import TrainingPlan, TransformerMemory, TransformerSpec, peak_memory
from benchmarks.published.transformer.network import TransformerNetwork
from benchmarks.published.transformer.pipeline import StageTime, pipeline_s
from benchmarks.published.transformer.stages import StageShape, stage_shapes

_ELEMENT = 2  # bytes of an activation
_MOMENTS = 8  # bytes of Adam's two moments of a parameter
#: Kernels of a softmax with scale and causal mask between two conversions, less one: Megatron-LM's
#: ``forward_torch_softmax`` (megatron/model/fused_softmax.py).
_UNFUSED_SOFTMAX = 5


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What one step takes.

    Args:
        step_s: seconds of the step.
        pipeline_s: of them, all microbatches with fill and drain.
        data_parallel_s: gradient and parameter collectives that compute does not hide.
        optimizer_s: the update.
        layer_forward_s, layer_backward_s: one layer of one microbatch on its devices, recomputation included.
        memory: bytes of the fullest device by kind.
        fits: whether they fit the device.
    """

    step_s: float
    pipeline_s: float
    data_parallel_s: float
    optimizer_s: float
    layer_forward_s: float
    layer_backward_s: float
    memory: TransformerMemory
    fits: bool


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer of one microbatch.

    Args:
        forward_s: forward pass with its collectives.
        backward_s: backward pass, with recomputation and collectives.
        weights_s: the part of the backward pass that makes gradients of parameters.
    """

    forward_s: float
    backward_s: float
    weights_s: float


@dataclass(frozen=True)
class PlanStep:
    """The costs of a run whose plan has a bill.

    Args:
        spec: the model.
        plan: how it is trained.
        cluster: where; its first group's device and links count.
        cost: what things cost there under the program that ran.
        network: seconds of collectives of groups of devices.
        whole: the bill.
        traced: every microbatch converts parameters, adds gradients up, and sends at the ends of the model what the
            plan does, and awaits no send; published programs keep parameters in 16 bits, the stack says what adding
            up moves, and without the ends datasets that are left out are predicted a little better.
    """

    spec: TransformerSpec
    plan: TrainingPlan
    cluster: Cluster
    cost: CostModel
    network: TransformerNetwork
    whole: RunBill
    traced: bool = False

    @functools.cached_property
    def lines(self) -> Mapping[tuple[Section, Phase], tuple[Lines, ...]]:
        """Kernels of a layer and of the ends."""
        return lines(self.whole.bill, self.traced)

    @property
    def stack(self) -> Stack:
        """What ran it."""
        return self.cost.stack

    def kernels_s(self, section: Section, phase: Phase, *, core_only: bool = False) -> float:
        """Seconds of kernels of one layer, or end, of a microbatch; of the core of attention alone if asked."""
        return sum(
            found.seconds(self.cost, self.spec.dtype, backward=phase == "backward")
            for found in self.lines.get((section, phase), ())
            if found.core or not core_only
        )

    @property
    def softmax_kernels(self) -> int:
        """Kernels that a pass of one layer starts beyond those of a softmax in one kernel, where that does not do."""
        heads = self.plan.microbatch * self.spec.heads // self.plan.tp
        return _UNFUSED_SOFTMAX if heads % self.stack.softmax_batches else 0

    def host_s(self, phase: Phase) -> float:
        """Seconds of the host to start the kernels of one layer."""
        started = sum(found.kernels for found in self.lines.get(("layer", phase), ()))
        return started * self.cost.start_s(backward=phase == "backward")

    @functools.cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Ranks and stride of the groups along each mesh axis."""
        plan = self.plan
        roles = [(plan.cp, plan.tp), (plan.tp, 1)]
        return dict(zip("xy", [r for r in roles if r[0] > 1], strict=False))

    def message_s(self, m: BilledMessage) -> float:
        """Seconds of a collective."""
        groups = [self.axes[a] for a in m.axes.split("+")]
        ranks, stride = math.prod(n for n, _ in groups), min(s for _, s in groups)
        if m.kind in ("collective-permute", "send"):
            return self.network.send_s(m.bytes, stride, self.network.devices_per_node)
        return self.network.collective_s(m.kind, m.bytes, ranks, stride)

    def moved_s(self, phase: Literal["forward", "backward", "recompute"]) -> float:
        """Seconds of one layer's collectives of activations of one pass, or of recomputing, that nothing hides."""
        again = phase == "recompute"
        found = [
            m
            for m in self.whole.bill.messages
            if m.consumer.count("/body/") >= 2
            and m.phase == ("backward" if again else phase)
            and (RECOMPUTED in m.consumer) == again
        ]
        total_s = sum(m.count * self.message_s(m) for m in found) / (MICROBATCHES * LAYERS)
        return total_s * self.cost.exposed_share(of_state=False)

    def moved_at_s(self, end: Section, phase: Literal["forward", "backward"]) -> float:
        """Seconds of the collectives of activations of one microbatch at an end of the model."""
        found = [
            m
            for m in self.whole.bill.messages
            if m.consumer.count("/body/") == 1 and m.phase == phase and _end_of(m.consumer) == end
        ]
        total_s = sum(m.count * self.message_s(m) for m in found) / MICROBATCHES
        return total_s * self.cost.exposed_share(of_state=False)

    def layer(self) -> LayerTime:
        """One layer of one microbatch: what kernels and collectives take, or the host to start them if that is more."""
        plan, stack = self.plan, self.stack
        forward_s, back_s = self.kernels_s("layer", "forward"), self.kernels_s("layer", "backward")
        again = plan.recompute == "full"
        if plan.recompute == "selective" and self.traced:
            back_s += self.kernels_s("layer", "recompute") + self.moved_s("recompute")
        elif plan.recompute == "selective" and not stack.fused_attention:
            back_s += self.kernels_s("layer", "recompute", core_only=True)
        elif again:
            # Compilers leave out what nothing reads; other programs run the whole layer again, collectives too.
            if self.traced or not stack.runs_whole_again:
                back_s += self.kernels_s("layer", "recompute") + self.moved_s("recompute")
            else:
                back_s += forward_s + self.moved_s("forward")
        wait_s = 2 * stack.wait_s if plan.tp > 1 else 0.0
        collectives = (2 if plan.tp > 1 else 0) * (2 if plan.sequence_parallel else 1)
        straggle_s = collectives * stack.collective_s
        host_s = self.host_s("forward") + straggle_s + self.softmax_kernels * stack.start_s
        host_back_s = self.host_s("backward") + straggle_s + self.softmax_kernels * stack.start_backward_s
        back_s += self.moved_s("backward") + wait_s + (wait_s if again else 0.0)
        return LayerTime(
            self.cost.together_s(forward_s + self.moved_s("forward") + wait_s, host_s),
            self.cost.together_s(back_s, host_back_s + (host_s if again else 0.0)),
            self._weights_s("layer"),
        )

    def _weights_s(self, section: Section) -> float:
        """Seconds of the products that make gradients of parameters: as many as the forward pass has of parameters."""
        found = self.lines.get((section, "forward"), ())
        return sum(
            float((f.product_counts * self.cost.product_s(f.products, self.spec.dtype)).sum())
            for f in found
            if not f.core
        )

    def stage(self, stage: StageShape, layer: LayerTime) -> StageTime:
        """One microbatch on one stage."""
        stack = self.stack
        forward_s = stage.layers * layer.forward_s + stack.microbatch_s / 3
        backward_s = stage.layers * layer.backward_s + stack.microbatch_s * 2 / 3
        weights_s = stage.layers * layer.weights_s
        for end in _ends(stage):
            forward_s += self.kernels_s(end, "forward") + (self.moved_at_s(end, "forward") if self.traced else 0.0)
            backward_s += self.kernels_s(end, "backward") + (self.moved_at_s(end, "backward") if self.traced else 0.0)
            weights_s += self._weights_s(end)
        backward_s += self._sums_s(stage)
        adding = 0.0 if self.traced else stack.partition_bytes if self.plan.zero else stack.accumulate_bytes
        backward_s += self.cost.operator_s(0.0, adding * self.shared.elements(stage), "f32", starts=False)
        return StageTime(forward_s, backward_s, weights_s, self.sends_s(stage))

    def _sums_s(self, stage: StageShape) -> float:
        """Seconds of adding a microbatch's gradients to the others', as traced; with ZeRO-3 each device has a part."""
        total_s = stage.layers * self.kernels_s("layer", "sum") + sum(self.kernels_s(e, "sum") for e in _ends(stage))
        return total_s / (self.plan.dp * self.plan.cp if self.plan.zero == 3 else 1)

    @functools.cached_property
    def shared(self) -> SharedState:
        """What replicas share."""
        return SharedState(self.spec, self.plan, self.cost, self.network, self.whole)

    def sends_s(self, stage: StageShape) -> float:
        """Seconds that the sends of one microbatch to and from its neighbours add to a stage, forward and backward.

        Where several stages share a node only those at its ends send to other nodes.
        """
        plan, spec, network = self.plan, self.spec, self.network
        if plan.pp == 1:
            return 0.0
        bytes = _ELEMENT * plan.microbatch * spec.seq / plan.cp * spec.hidden
        if plan.sequence_parallel or self.stack.scatter_sends:
            bytes /= plan.tp
        stride, per_node = plan.stage_stride, network.devices_per_node
        before, after = (
            network.send_s(bytes, per_node if self._crosses(k) else min(stride, per_node - 1), min(stride, per_node))
            for k in (max(stage.index - 1, 0), min(stage.index, plan.pp - 2))
        )
        return plan.chunks * (before + after) * (1.0 if self.traced else 1 - self.stack.pp_overlap)

    def _crosses(self, boundary: int) -> bool:
        """Whether what stage ``boundary`` sends to the next one leaves its node."""
        stride, per_node = self.plan.stage_stride, self.network.devices_per_node
        first, last = boundary * stride, (boundary + 1) * stride - 1
        return first // per_node != (last + stride) // per_node

    def optimizer_s(self, stage: StageShape) -> float:
        """Seconds of the update of one stage."""
        plan = self.plan
        total_s = stage.layers * self.kernels_s("layer", "update")
        total_s += sum(self.kernels_s(end, "update") for end in _ends(stage))
        parts = plan.dp * plan.cp if plan.zero else 1
        moved_bytes = _MOMENTS * self.shared.elements(stage) / parts if plan.offload else 0.0
        return total_s / parts + 2 * self.cost.host_s(moved_bytes)

    def predict(self) -> StepPrediction:
        """Seconds and bytes of a step."""
        plan, layer = self.plan, self.layer()
        shapes = stage_shapes(self.spec, plan)
        times = {s: self.stage(s, layer) for s in shapes}
        schedule = "1f1b" if plan.schedule == "interleaved" and plan.chunks == 1 else plan.schedule
        each, count = [times[s] for s in shapes], plan.num_microbatches
        pipe_s = pipeline_s(each, count, schedule, plan.chunks, awaits_sends=not self.traced)
        reduce_s = max(self.shared.data_parallel_s(s, times[s]) for s in shapes) + self.shared.tied_s()
        update_s = max(self.optimizer_s(s) for s in shapes)
        memory = peak_memory(self.spec, plan, self.stack)
        return StepPrediction(
            step_s=pipe_s + reduce_s + update_s + self.stack.step_s,
            pipeline_s=pipe_s,
            data_parallel_s=reduce_s,
            optimizer_s=update_s,
            layer_forward_s=layer.forward_s,
            layer_backward_s=layer.backward_s,
            memory=memory,
            fits=memory.total_bytes <= self.cluster.groups[0].device.memory_bytes,
        )


def _end_of(consumer: str) -> Section:
    """The end of the model where an operator outside of layers is."""
    return section_of("", (), consumer.rpartition("/")[2].rpartition(".")[0])


def _ends(stage: StageShape) -> Iterable[Section]:
    if stage.first:
        yield "first"
    if stage.last:
        yield "last"


def plan_step(
    spec: TransformerSpec,
    plan: TrainingPlan,
    cluster: Cluster,
    constants: Constants,
    stack: str,
    *,
    traced: bool = False,
) -> PlanStep:
    """The costs of a run by the bill of its plan.

    Args:
        spec: the model.
        plan: how it is trained.
        cluster: where.
        constants: of kernels, networks and stacks.
        stack: name of the training program among them.
        traced: see `PlanStep`.

    Raises:
        InfeasiblePlanError: the plan does not suit the model.
        AutoparError: the stack is unknown.
    """
    plan.check(spec)
    shape = shape_of(spec, plan, traced=traced)
    cost = CostModel(dataclasses.replace(cluster, stack=stack), constants=constants)
    whole = bill(shape, stage_cluster(cluster, shape.tp * shape.cp))
    return PlanStep(spec, plan, cluster, cost, TransformerNetwork.of(cluster, constants.network), whole, traced)


def predict_plan(
    spec: TransformerSpec, plan: TrainingPlan, cluster: Cluster, constants: Constants, stack: str
) -> StepPrediction:
    """Seconds and bytes of a step; arguments and errors are those of `plan_step`."""
    return plan_step(spec, plan, cluster, constants, stack).predict()
