"""The operators of one transformer layer and of the ends of the stack, as one device runs them.

Forward, one layer of a microbatch of b examples, t = tp, c = cp, T = b s / c tokens a device, T' = T / t where
sequence parallelism splits them, else T:

    norm, QKV product (T, h, (a + 2 kv) d / t), attention core, projection (T, a d / t, h), dropout and residual,
    norm, products (T, h, f / t) and (T, f / t, h), activation, dropout and residual

The attention core is what selective recomputation repeats (Korthikanti et al., "Reducing activation recomputation
in large transformer models", 2022, section 5): two products of s x s a head, softmax, dropout; or one fused kernel
that never writes the s x s values (Dao et al., "FlashAttention", 2022) and skips half of a causal mask.
The backward pass of a product is two products of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.transformer.plan import TrainingPlan
from autopar.cost.transformer.spec import TransformerSpec

#: What an operator belongs to; only "core" is repeated by selective recomputation.
Region = Literal["dense", "core"]

_ALIGNMENT = 8  # elements of 16 bits that tensor cores read at once


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` matrix products of (m, k) by (k, n).

    Args:
        name: for people.
        m, n, k: sizes on one device.
        batch: how many at once.
        share: fraction of the FLOPs that is done (half under a causal mask that is made use of).
        reads_once: intermediate results stay on the chip, so memory does not limit it.
        region: "core" for what selective recomputation repeats.
        misaligned: a row of an operand is no multiple of 16 bytes, which tensor cores need to read it whole.
    """

    name: str
    m: float
    n: float
    k: float
    batch: float = 1.0
    share: float = 1.0
    reads_once: bool = False
    region: Region = "dense"
    misaligned: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of the forward product."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.share

    def backward(self) -> tuple[Product, Product]:
        """The products of the gradients of both operands."""
        return replace(self, n=self.k, k=self.n), replace(self, m=self.k, k=self.m)


@dataclass(frozen=True, slots=True)
class Sweep:
    """An operator that memory limits.

    Args:
        name: for people.
        forward_bytes, backward_bytes: read and written on one device.
        region: "core" for what selective recomputation repeats.
    """

    name: str
    forward_bytes: float
    backward_bytes: float
    region: Region = "dense"


@dataclass(frozen=True, slots=True)
class Operators:
    """What one device runs for one microbatch.

    Args:
        products: matrix products, forward.
        sweeps: operators that memory limits.
    """

    products: tuple[Product, ...]
    sweeps: tuple[Sweep, ...]


def layer_operators(
    spec: TransformerSpec,
    plan: TrainingPlan,
    *,
    fused_attention: bool,
    traffic: float = 1.0,
    core_traffic: float = 1.0,
) -> Operators:
    """One layer's operators for one microbatch on one device.

    Args:
        spec: the model.
        plan: its degrees of parallelism and microbatch size.
        fused_attention: attention is one kernel that keeps its s x s values on the chip.
        traffic: bytes of memory-bound operators over those listed above.
        core_traffic: the same for those of the attention core.
    """
    t, c, b = plan.tp, plan.cp, plan.microbatch
    s, h, f = spec.seq, spec.hidden, spec.ffn
    tokens = b * s / c
    split = tokens / t if plan.sequence_parallel else tokens
    heads = spec.heads / t
    qkv = (spec.query_width + spec.key_value_width) / t
    expert_tokens = tokens * spec.experts_per_token
    share = 0.5 if fused_attention else 1.0
    core = Product(
        "core", s / c, s, s, b * heads, share, fused_attention, "core", misaligned=spec.head_dim % _ALIGNMENT > 0
    )
    up = f * (2 if spec.gated else 1) / t
    products = (
        Product("qkv", tokens, qkv, h),
        replace(core, name="scores", n=s, k=spec.head_dim),
        replace(core, name="context", n=spec.head_dim, k=s),
        Product("projection", tokens, h, spec.query_width / t),
        Product("up", expert_tokens * plan.ep / spec.experts, up, h, batch=spec.experts / plan.ep),
        Product("down", expert_tokens * plan.ep / spec.experts, h, f / t, batch=spec.experts / plan.ep),
    )
    scores = b * heads * s * s / c
    mask = 1.0 if spec.dropout else 0.0
    sweeps = [
        Sweep("norm", 4 * split * h, 8 * split * h),
        Sweep("heads", 4 * tokens * qkv, 4 * tokens * qkv),
        Sweep("residual", (6 + mask) * split * h, (4 + mask) * split * h),
        Sweep("norm", 4 * split * h, 8 * split * h),
        Sweep("activation", 2 * expert_tokens * (up + f / t), 2 * expert_tokens * (2 * up + f / t)),
        Sweep("residual", (6 + mask) * split * h, (4 + mask) * split * h),
    ]
    if spec.experts > 1:
        sweeps.append(Sweep("dispatch", 8 * expert_tokens * h, 8 * expert_tokens * h))
    if not fused_attention:
        sweeps.append(Sweep("softmax", 4 * scores, 6 * scores, "core"))
        if spec.dropout:
            sweeps.append(Sweep("attention dropout", 5 * scores, 5 * scores, "core"))
    return Operators(products, tuple(_scaled(o, core_traffic if o.region == "core" else traffic) for o in sweeps))


def _scaled(sweep: Sweep, factor: float) -> Sweep:
    return replace(sweep, forward_bytes=factor * sweep.forward_bytes, backward_bytes=factor * sweep.backward_bytes)


def output_operators(spec: TransformerSpec, plan: TrainingPlan) -> Operators:
    """The projection to the vocabulary and the loss, for one microbatch on one device of the last stage.

    The loss is computed in f32: logits are cast, the maximum, exponential and sum taken, and the gradient
    written (Megatron-LM's vocabulary-parallel cross entropy).
    """
    tokens = plan.microbatch * spec.seq / plan.cp
    vocab = spec.vocab / plan.tp
    # Where it is split the vocabulary is padded, so that only a whole one can be misaligned.
    misaligned = plan.tp == 1 and spec.vocab % _ALIGNMENT > 0
    return Operators(
        (Product("logits", tokens, vocab, spec.hidden, misaligned=misaligned),),
        (
            Sweep("loss", 26 * tokens * vocab, 14 * tokens * vocab),
            Sweep("norm", 4 * tokens * spec.hidden, 8 * tokens * spec.hidden),
        ),
    )


def embedding_operators(spec: TransformerSpec, plan: TrainingPlan) -> Operators:
    """Looking up the embeddings, for one microbatch on one device of the first stage."""
    tokens = plan.microbatch * spec.seq / plan.cp
    return Operators((), (Sweep("embedding", 12 * tokens * spec.hidden, 12 * tokens * spec.hidden),))
