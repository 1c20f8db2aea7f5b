"""What replicas of a published run share: gradients that they sum, parameters that they gather."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost import CostModel
from benchmarks.published.plans import RunBill
from benchmarks.published.transformer import TrainingPlan, TransformerSpec
from benchmarks.published.transformer.network import TransformerNetwork
from benchmarks.published.transformer.pipeline import StageTime
from benchmarks.published.transformer.stages import StageShape, dense_parameters, expert_parameters, stage_shapes

_ELEMENT = 2  # bytes of a parameter that is sent


@dataclass(frozen=True)
class SharedState:
    """Collectives of gradients and parameters.

    Args:
        spec: the model.
        plan: how it is trained.
        cost: what things cost under the program that ran.
        network: seconds of collectives.
        whole: sizes of the parameters.
    """

    spec: TransformerSpec
    plan: TrainingPlan
    cost: CostModel
    network: TransformerNetwork
    whole: RunBill

    def elements(self, stage: StageShape) -> float:
        """Parameters of a stage on one device."""
        return dense_parameters(self.spec, self.plan, stage) + expert_parameters(self.spec, self.plan, stage)

    def data_parallel_s(self, stage: StageShape, time: StageTime) -> float:
        """Seconds of the step's gradient and parameter collectives of one stage that compute does not hide."""
        plan = self.plan
        replicas = plan.dp * plan.cp
        if replicas < 2:
            return 0.0
        stride = plan.tp * (plan.pp if plan.stages_together else 1)
        total_s, compute_s = self._partitioned_s(stage, replicas, stride), time.backward_s
        if plan.zero == 3:
            compute_s = plan.num_microbatches * (time.forward_s + time.backward_s)
        else:
            dense, experts = self._parameters_of_node(stage)
            total_s = self._reduced_s(dense, replicas, stride)
            if experts and replicas > plan.ep:
                total_s += self._reduced_s(experts, replicas // plan.ep, stride * plan.ep)
            compute_s += time.forward_s if plan.zero else 0.0
        return total_s - min(self.cost.stack.dp_overlap * total_s, compute_s)

    def _reduced_s(self, elements: float, ranks: int, stride: int) -> float:
        """Seconds of summing gradients of so many elements, and of gathering the parameters with ZeRO 1 and 2."""
        gradients = self._sent_s("reduce-scatter" if self.plan.zero else "all-reduce", elements, ranks, stride)
        return gradients + (self._sent_s("all-gather", elements, ranks, stride) if self.plan.zero else 0.0)

    def _sent_s(self, kind: str, elements: float, ranks: int, stride: int) -> float:
        """Seconds of sending all elements of a stage, as many at once as the program combines."""
        stack = self.cost.stack
        each = _ELEMENT if kind == "all-gather" else stack.gradient_bytes
        whole = [n * each for n in (*self.whole.layer, *self.whole.ends)]
        sent = self.cost.combined(whole, stack.combine_bytes)
        full = elements * each
        count = max(1.0, full / max(sum(sent) / len(sent), stack.combine_bytes))
        return count * self.network.collective_s(kind, full / count, ranks, stride)

    def _partitioned_s(self, stage: StageShape, ranks: int, stride: int) -> float:
        """Seconds of ZeRO-3: every microbatch gathers parameters in each pass and scatters gradients."""
        if self.plan.zero != 3:
            return 0.0
        stack, total_s = self.cost.stack, 0.0
        gathers = 3 if stack.gathers_again and self.plan.recompute == "full" else 2
        for passes, kind, bytes in ((gathers, "all-gather", _ELEMENT), (1, "reduce-scatter", stack.gradient_bytes)):
            limit = stack.gather_bytes if kind == "all-gather" else stack.combine_bytes
            for count, group in ((stage.layers, self.whole.layer), (int(stage.first or stage.last), self.whole.ends)):
                sizes = self.cost.combined([bytes * n for n in group], limit)
                each_s = (self.network.collective_s(kind, s / stack.link_share, ranks, stride) for s in sizes)
                total_s += passes * count * sum(each_s)
        return self.plan.num_microbatches * total_s

    def _parameters_of_node(self, stage: StageShape) -> tuple[float, float]:
        """Parameters on one device, dense and of experts: the mean over the stages that share a node with ``stage``.

        Their collectives share the node's cards: when those of small stages are done, the rest has more of them.
        """
        plan = self.plan
        together = max(1, self.network.devices_per_node // plan.stage_stride) if plan.stages_together else 1
        first = stage.index // together * together
        mates = stage_shapes(self.spec, plan)[first : first + together]
        dense = sum(dense_parameters(self.spec, plan, s) for s in mates) / len(mates)
        return dense, sum(expert_parameters(self.spec, plan, s) for s in mates) / len(mates)

    def tied_s(self) -> float:
        """Seconds to sum the gradients of an embedding that the first and last stage share."""
        plan, spec = self.plan, self.spec
        if plan.pp == 1 or not spec.tied:
            return 0.0
        full = self.cost.stack.gradient_bytes * spec.vocab * spec.hidden / plan.tp
        inside = plan.pp * plan.stage_stride <= self.network.devices_per_node
        apart = plan.stage_stride if inside else max((plan.pp - 1) * plan.stage_stride, self.network.devices_per_node)
        return self.network.collective_s("all-reduce", full, 2, apart, sharing=plan.stage_stride)
