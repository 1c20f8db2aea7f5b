"""`predict`: seconds and bytes of one training step of a transformer under a plan that a person names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost.constants import Constants, Stack
from autopar.cost.transformer.kernels import KernelTimer
from autopar.cost.transformer.memory import TransformerMemory, peak_memory
from autopar.cost.transformer.network import Network
from autopar.cost.transformer.operators import (
    Operators,
    embedding_operators,
    layer_operators,
    output_operators,
)
from autopar.cost.transformer.pipeline import StageTime, pipeline_s
from autopar.cost.transformer.plan import TrainingPlan
from autopar.cost.transformer.spec import TransformerSpec
from autopar.cost.transformer.stages import StageShape, dense_parameters, expert_parameters, stage_shapes

_ELEMENT = 2  # bytes of an activation
_BLEND = 4  # how sharply the larger of two rates decides; it is the usual choice for such transitions


def together_s(device_s: float, host_s: float) -> float:
    """Seconds of work that a device does while the host starts it: the larger, and more where they are close.

    Kernels differ in size, so some wait for the host while the host waits for others.
    """
    return float((device_s**_BLEND + host_s**_BLEND) ** (1 / _BLEND))


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What one step takes.

    Args:
        step_s: seconds of the step.
        pipeline_s: of them, all microbatches with fill and drain.
        bubble_s: of the pipeline, what its slowest stage is idle.
        data_parallel_s: gradient and parameter collectives that compute does not hide.
        optimizer_s: the update.
        layer_forward_s, layer_backward_s: one layer of one microbatch on its devices, recomputation included.
        memory: bytes of the fullest device by kind.
        fits: whether they fit the device.
    """

    step_s: float
    pipeline_s: float
    bubble_s: float
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
class StepModel:
    """The costs of a transformer on a cluster.

    Args:
        spec: the model.
        plan: how it is trained.
        cluster: where; its first group's device and links count.
        stack: what runs it.
        constants: how fast kernels run.
    """

    spec: TransformerSpec
    plan: TrainingPlan
    cluster: Cluster
    stack: Stack
    constants: Constants

    @property
    def timer(self) -> KernelTimer:
        """Seconds of kernels."""
        device = self.cluster.groups[0].device
        constants, kind = self.constants, device.kind
        return KernelTimer(
            device, constants.kernels, constants.cores_of(kind) or 1, self.spec.dtype, constants.best_f8_of(kind)
        )

    @property
    def network(self) -> Network:
        """Seconds of collectives."""
        return Network.of(self.cluster, self.constants.network)

    def tensor_collectives_s(self) -> float:
        """Seconds of one pass's tensor-parallel collectives of one layer, before compute hides any.

        Two all-reduces of s b h forward and two backward (Shoeybi et al., "Megatron-LM", 2019); with sequence
        parallelism each is a reduce-scatter and an all-gather.
        """
        plan = self.plan
        full = _ELEMENT * plan.microbatch * self.spec.seq / plan.cp * self.spec.hidden
        kinds = ("all-gather", "reduce-scatter") if plan.sequence_parallel else ("all-reduce",)
        return 2 * sum(self.network.collective_s(k, full, plan.tp, 1) for k in kinds)

    def expert_collectives_s(self) -> float:
        """Seconds of one pass's all-to-alls of one layer: to the experts and back."""
        plan, spec = self.plan, self.spec
        tokens = plan.microbatch * spec.seq / plan.cp * spec.experts_per_token
        full = _ELEMENT * tokens * spec.hidden * plan.ep / plan.tp
        return 2 * self.network.collective_s("all-to-all", full, plan.ep, plan.tp * plan.cp)

    def context_s(self) -> float:
        """Seconds to pass keys and values round the ring of devices that share an example's tokens."""
        plan, spec = self.plan, self.spec
        if plan.cp == 1:
            return 0.0
        piece = _ELEMENT * plan.microbatch * spec.seq / plan.cp * spec.key_value_width / plan.tp
        return (plan.cp - 1) * self.network.send_s(piece, plan.tp, self.network.devices_per_node)

    def layer(self) -> LayerTime:
        """One layer of one microbatch: what kernels and collectives take, or the host to start them if that is more."""
        spec, plan, stack, timer = self.spec, self.plan, self.stack, self.timer
        operators = layer_operators(
            spec,
            plan,
            fused_attention=stack.fused_attention,
            traffic=stack.traffic,
            core_traffic=stack.core_traffic,
        )
        core_s = timer.core_forward_s(operators)
        compute_s = timer.forward_s(operators)
        back_s = timer.backward_s(operators)
        tp_s = self.tensor_collectives_s() / stack.link_share * (1 - stack.tp_overlap)
        ring_s = self.context_s()
        wait_s = 2 * stack.wait_s if plan.tp > 1 else 0.0
        moved_s = tp_s + wait_s + self.expert_collectives_s()
        collectives = (2 if plan.tp > 1 else 0) * (2 if plan.sequence_parallel else 1)
        straggle_s = collectives * math.log2(plan.tp) * stack.collective_s
        host_s = stack.layer_forward_s + straggle_s
        host_back_s = stack.layer_backward_s + straggle_s
        forward_s = together_s(compute_s + moved_s + max(0.0, ring_s - core_s), host_s)
        backward_s = together_s(back_s + moved_s + max(0.0, 2 * (ring_s - core_s)), host_back_s)
        if plan.recompute == "full":
            backward_s += forward_s
        elif plan.recompute == "selective" and not stack.fused_attention:
            backward_s += core_s
        weights = Operators(tuple(o for o in operators.products if o.region == "dense"), ())
        return LayerTime(forward_s, backward_s, timer.backward_s(weights) / 2)

    def stage(self, stage: StageShape, layer: LayerTime) -> StageTime:
        """One microbatch on one stage."""
        spec, plan, stack, timer = self.spec, self.plan, self.stack, self.timer
        forward_s = stage.layers * layer.forward_s + stack.microbatch_s / 3
        backward_s = stage.layers * layer.backward_s + stack.microbatch_s * 2 / 3
        for there, ends in ((stage.first, embedding_operators), (stage.last, output_operators)):
            if there:
                forward_s += timer.forward_s(ends(spec, plan))
                backward_s += timer.backward_s(ends(spec, plan))
        elements = self.elements(stage)
        backward_s += timer.bytes_s((stack.partition_bytes if plan.zero else stack.accumulate_bytes) * elements)
        return StageTime(forward_s, backward_s, stage.layers * layer.weights_s, self.sends_s(stage))

    def elements(self, stage: StageShape) -> float:
        """Parameters of a stage on one device."""
        return dense_parameters(self.spec, self.plan, stage) + expert_parameters(self.spec, self.plan, stage)

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
        before, behind = (
            network.send_s(bytes, per_node if self._crosses(k) else min(stride, per_node - 1), min(stride, per_node))
            for k in (max(stage.index - 1, 0), min(stage.index, plan.pp - 2))
        )
        return plan.chunks * (before + behind) * (1 - self.stack.pp_overlap)

    def _crosses(self, boundary: int) -> bool:
        """Whether what stage ``boundary`` sends to the next one leaves its node."""
        stride, per_node = self.plan.stage_stride, self.network.devices_per_node
        first, last = boundary * stride, (boundary + 1) * stride - 1
        return first // per_node != (last + stride) // per_node

    def data_parallel_s(self, stage: StageShape, time: StageTime) -> float:
        """Seconds of the step's gradient and parameter collectives of one stage that compute does not hide."""
        plan, stack, network = self.plan, self.stack, self.network
        replicas = plan.dp * plan.cp
        stride = plan.tp * (plan.pp if plan.stages_together else 1)
        dense, experts = self._parameters_of_node(stage)
        groups = ((dense, replicas, stride), (experts, replicas // plan.ep, stride * plan.ep))
        total_s = 0.0
        for elements, ranks, apart in groups:
            if ranks < 2 or not elements:
                continue
            gradients, values = stack.gradient_bytes * elements, _ELEMENT * elements
            if plan.zero == 0:
                total_s += network.collective_s("all-reduce", gradients, ranks, apart)
            elif plan.zero < 3:
                total_s += network.collective_s("reduce-scatter", gradients, ranks, apart)
                total_s += network.collective_s("all-gather", values, ranks, apart)
            else:
                each_s = 2 * network.collective_s("all-gather", values, ranks, apart)
                each_s += network.collective_s("reduce-scatter", gradients, ranks, apart)
                total_s += plan.num_microbatches * each_s
        compute_s = time.backward_s
        if plan.zero == 3:
            compute_s = plan.num_microbatches * (time.forward_s + time.backward_s)
        elif plan.zero:
            compute_s += time.forward_s
        return total_s - min(stack.dp_overlap * total_s, compute_s)

    def _parameters_of_node(self, stage: StageShape) -> tuple[float, float]:
        """Parameters on one device, dense and of experts: the mean over the stages that share a node with ``stage``.

        Their collectives share the node's cards: when those of small stages are done, the rest has more of them.
        """
        plan = self.plan
        together = max(1, self.network.devices_per_node // plan.stage_stride) if plan.stages_together else 1
        first = stage.index // together * together
        shapes = stage_shapes(self.spec, plan)[first : first + together]
        dense = sum(dense_parameters(self.spec, plan, s) for s in shapes) / len(shapes)
        return dense, sum(expert_parameters(self.spec, plan, s) for s in shapes) / len(shapes)

    def optimizer_s(self, stage: StageShape) -> float:
        """Seconds of the update of one stage."""
        plan = self.plan
        elements = self.elements(stage)
        if plan.zero:
            elements /= plan.dp * plan.cp
        return self.timer.bytes_s(self.stack.optimizer_bytes * elements)

    def predict(self) -> StepPrediction:
        """Seconds and bytes of a step."""
        plan = self.plan
        layer = self.layer()
        shapes = stage_shapes(self.spec, plan)
        times = {s: self.stage(s, layer) for s in shapes}
        stages = [times[s] for s in shapes]
        schedule = "1f1b" if plan.schedule == "interleaved" and plan.chunks == 1 else plan.schedule
        pipe_s = pipeline_s(stages, plan.num_microbatches, schedule, plan.chunks)
        busy_s = plan.num_microbatches * max(s.total_s for s in stages)
        reduce_s = max(self.data_parallel_s(s, times[s]) for s in shapes)
        tied_s = self.tied_s()
        update_s = max(self.optimizer_s(s) for s in shapes)
        memory = peak_memory(self.spec, plan, self.stack)
        return StepPrediction(
            step_s=pipe_s + reduce_s + tied_s + update_s + self.stack.step_s,
            pipeline_s=pipe_s,
            bubble_s=pipe_s - busy_s,
            data_parallel_s=reduce_s + tied_s,
            optimizer_s=update_s,
            layer_forward_s=layer.forward_s,
            layer_backward_s=layer.backward_s,
            memory=memory,
            fits=memory.total_bytes <= self.cluster.groups[0].device.memory_bytes,
        )

    def tied_s(self) -> float:
        """Seconds to sum the gradients of an embedding that the first and last stage share."""
        plan, spec = self.plan, self.spec
        if plan.pp == 1 or not spec.tied:
            return 0.0
        full = self.stack.gradient_bytes * spec.vocab * spec.hidden / plan.tp
        inside = plan.pp * plan.stage_stride <= self.network.devices_per_node
        apart = plan.stage_stride if inside else max((plan.pp - 1) * plan.stage_stride, self.network.devices_per_node)
        return self.network.collective_s("all-reduce", full, 2, apart, sharing=plan.stage_stride)


def predict(
    spec: TransformerSpec, plan: TrainingPlan, cluster: Cluster, constants: Constants, stack: str = "megatron"
) -> StepPrediction:
    """Seconds and bytes of one training step.

    Args:
        spec: the model.
        plan: how it is trained.
        cluster: where; it must have as many devices as the plan, or more.
        constants: from `autopar.cost.transformer.load_constants`.
        stack: name of the training program among them.

    Raises:
        InfeasiblePlanError: the plan does not suit the model.
        AutoparError: the stack is unknown.
    """
    plan.check(spec)
    return StepModel(spec, plan, cluster, constants.stack(stack), constants).predict()
