"""Bytes of one device while a transformer is trained, by kind.

Model state with Adam in mixed precision (Rajbhandari et al., "ZeRO", 2020, section 3.1): parameters of 2 bytes,
gradients of 2 (or 4), optimizer state of 12, each divided by dp from its ZeRO stage on. Activations of a layer
(Korthikanti et al., 2022, section 4), 16-bit: s b h (10 + 24/t + 5 a s/(h t)), everything divided by t with
sequence parallelism; without the last term where attention is recomputed or fused; 2 s b h where the layer is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.cost.constants import Stack
from benchmarks.published.transformer.plan import TrainingPlan
from benchmarks.published.transformer.spec import TransformerSpec
from benchmarks.published.transformer.stages import StageShape, dense_parameters, expert_parameters, stage_shapes

_ELEMENT = 2  # bytes of a parameter and of an activation
_OPTIMIZER = 12  # bytes of Adam's state an element: f32 copy, momentum, variance (K of the ZeRO paper)
#: Part of them that is on the device where momentum and variance lie in host memory.
_KEPT = 1 / 3


@dataclass(frozen=True, slots=True)
class TransformerMemory:
    """Bytes of one device, by kind.

    Args:
        parameters_bytes, gradients_bytes, optimizer_bytes: model state.
        activations_bytes: kept for the backward pass, of all microbatches in flight.
        temporaries_bytes: what one layer being recomputed, or the loss, needs besides.
        buffers_bytes: what collectives are gathered into.
        reserved_bytes: taken by the runtime and its libraries, and lost to fragmentation.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float = 0.0
    temporaries_bytes: float = 0.0
    buffers_bytes: float = 0.0
    reserved_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


def model_state(parameters: float, dp: int, zero: int, gradient_bytes: float = 2.0) -> TransformerMemory:
    """Parameters, gradients and optimizer state with Adam in mixed precision (ZeRO, table 1).

    Args:
        parameters: elements that one replica keeps on a device.
        dp: replicas.
        zero: ZeRO stage.
        gradient_bytes: bytes of an element of the gradients.
    """
    return TransformerMemory(
        _ELEMENT * parameters / (dp if zero >= 3 else 1),
        gradient_bytes * parameters / (dp if zero >= 2 else 1),
        _OPTIMIZER * parameters / (dp if zero >= 1 else 1),
    )


def layer_activation_bytes(
    spec: TransformerSpec, plan: TrainingPlan, *, fused_attention: bool = False, recompute: str | None = None
) -> float:
    """Bytes that one layer keeps of one microbatch for its backward pass, on one device.

    Args:
        spec: the model.
        plan: its degrees of parallelism, microbatch size and recomputation.
        fused_attention: the s x s values are never written.
        recompute: instead of the plan's.
    """
    recompute = plan.recompute if recompute is None else recompute
    t = plan.tp
    tokens = plan.microbatch * spec.seq / plan.cp
    split = t if plan.sequence_parallel else 1
    if recompute == "full":
        return _ELEMENT * tokens * spec.hidden / split
    mask = 1 if spec.dropout else 0
    saved = 1 if spec.dtype.startswith("f8") else _ELEMENT  # operands of products with parameters
    expert_tokens = tokens * spec.experts_per_token
    whole = (
        tokens * spec.hidden * (2 * _ELEMENT + 2 * saved + 2 * mask)
    )  # inputs of two norms, attention, feed-forward network
    if spec.experts > 1:
        whole += _ELEMENT * expert_tokens * spec.hidden
    parts = _ELEMENT * tokens * (2 * spec.query_width + spec.key_value_width)
    parts += expert_tokens * spec.ffn * ((2 if spec.gated else 1) * _ELEMENT + saved)
    if not fused_attention and recompute == "none":
        parts += (2 * _ELEMENT if mask else _ELEMENT) * spec.heads * spec.seq * tokens
        parts += mask * spec.heads * spec.seq * tokens
    return whole / split + parts / t


def layers_in_flight(plan: TrainingPlan, stage: StageShape) -> float:
    """Layers of whose activations a stage keeps those of one microbatch, at its fullest (field: section 4)."""
    m, p, v, i = plan.num_microbatches, plan.pp, plan.chunks, stage.index
    match plan.schedule:
        case "gpipe":
            held = float(m)
        case "interleaved" if v > 1:
            held = min(m, p * (1 + (p - 1) / (p * v)) * (1 - i / p) + i / p)
        case "zb-h2":
            held = min(m, 2 * (p - i) - 1)
        case "zb-v":
            held = min(m, p)
        case _:
            held = min(m, p - i)
    return stage.layers * held


def stage_memory(spec: TransformerSpec, plan: TrainingPlan, stack: Stack, stage: StageShape) -> TransformerMemory:
    """Bytes of one device of ``stage``."""
    tokens = plan.microbatch * spec.seq / plan.cp
    replicas = plan.dp * plan.cp
    dense = dense_parameters(spec, plan, stage)
    experts = expert_parameters(spec, plan, stage)
    gradient_bytes = stack.bf16_gradient_bytes if spec.dtype == "bf16" else stack.gradient_bytes
    state = model_state(dense, replicas, plan.zero, gradient_bytes)
    expert_state = model_state(experts, max(1, replicas // plan.ep), plan.zero, gradient_bytes)
    layer = layer_activation_bytes(spec, plan, fused_attention=stack.fused_attention)
    whole = layer_activation_bytes(spec, plan, fused_attention=stack.fused_attention, recompute="none")
    activations = layers_in_flight(plan, stage) * layer
    temporaries = whole - layer
    if stage.last:
        logits = tokens * spec.vocab / plan.tp
        kept = _ELEMENT * logits if stack.fused_loss else (_ELEMENT + 4) * logits
        activations += tokens * spec.hidden * _ELEMENT
        temporaries = max(temporaries, kept + 4 * logits)
    buffers = _ELEMENT * tokens * spec.hidden * (1 if plan.tp > 1 else 0) * 2
    if plan.zero >= 3 and replicas > 1:
        buffers += 2 * _ELEMENT * (spec.attention_parameters + spec.expert_parameters) / plan.tp
    planned = (
        state.parameters_bytes + expert_state.parameters_bytes,
        state.gradients_bytes + expert_state.gradients_bytes,
        (state.optimizer_bytes + expert_state.optimizer_bytes) * (_KEPT if plan.offload else 1),
        activations,
        temporaries,
        buffers,
    )
    moving = activations + temporaries + buffers
    return TransformerMemory(*planned, stack.reserved_bytes + stack.fragmentation * moving)


def peak_memory(spec: TransformerSpec, plan: TrainingPlan, stack: Stack) -> TransformerMemory:
    """Bytes of the fullest device."""
    stages = [stage_memory(spec, plan, stack, s) for s in stage_shapes(spec, plan)]
    return max(stages, key=lambda m: m.total_bytes)
