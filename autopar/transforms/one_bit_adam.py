"""`one_bit_adam`: after a warm-up the momentum is exchanged as signs (Tang et al., ICML'21, algorithm 1).

    warm-up:  Adam with the mean gradient
    then, v frozen:  m_i = b1 m + (1 - b1) g_i;   s_i = C(m_i + d_i),   d_i = m_i + d_i - s_i
                     m = C(mean_i s_i + d),       d = mean_i s_i + d - m;       W -= rate * m / (sqrt(v) + eps)

C(x) = mean|x| sign(x), a bit an element. Every replica serves one chunk: d is dealt out, and the second C is of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError
from autopar.transforms.formats import Encoded, Format
from autopar.transforms.optimizers import Transformation, check_stacked
from autopar.transforms.replicas import check_replicas


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneBitAdamState:
    """State of 1-bit Adam: Adam's moments, and what compression left out of earlier messages (error feedback).

    Each field but the count has a leaf for each parameter.

    Args:
        momentum: first moment, of the parameter's shape.
        variance: second moment, of the parameter's shape.
        errors: error of each replica's own compressed momentum, in chunks: ``[replicas, replicas, chunk]``.
        server_errors: error of the compressed mean, of which each replica has a chunk: ``[replicas, chunk]``.
        count: updates done.
    """

    momentum: tuple[Any, ...]
    variance: tuple[Any, ...]
    errors: tuple[Any, ...]
    server_errors: tuple[Any, ...]
    count: Any


class Compression(Protocol):
    """A lossy compression: the codes that are sent, and the tensor that they stand for.

    ``valid`` is 1 for elements of the tensor and 0 for those that only fill a chunk.
    """

    def encode(self, x: Any, valid: Any) -> Any:
        """The codes of ``x``, compressed along its last dim."""

    def decode(self, sent: Any, valid: Any) -> Any:
        """The tensor that the codes ``sent`` stand for."""

    def value(self, x: Any, valid: Any) -> Any:
        """The tensor that a receiver decodes of ``x``, computed by the sender without codes."""


class Signs:
    """A bit an element, and the mean of the absolute values."""

    def encode(self, x: Any, valid: Any) -> Encoded:
        """The codes of ``x``, compressed along its last dim."""
        encoded = _sign_format(x.shape).encode(x)
        return replace(encoded, scales=self._scale(x, valid).astype(jnp.float32))

    def decode(self, sent: Encoded, valid: Any) -> Any:
        """The tensor that the codes ``sent`` stand for."""
        shape = (*sent.codes.shape[:-2], valid.shape[-1])
        return _sign_format(shape).decode(sent, shape, valid.dtype) * valid

    def value(self, x: Any, valid: Any) -> Any:
        """The tensor that a receiver decodes of ``x``, computed by the sender without codes."""
        scale = self._scale(x, valid).astype(jnp.float32).astype(x.dtype)
        return jnp.where(x >= 0, scale, -scale) * valid

    def _scale(self, x: Any, valid: Any) -> Any:
        return jnp.sum(jnp.abs(x * valid), axis=-1, keepdims=True) / jnp.maximum(
            jnp.sum(valid, axis=-1, keepdims=True), 1
        )


def _sign_format(shape: tuple[int, ...]) -> Format:
    """Signs with the whole last dim as one block."""
    return Format("sign", -(-shape[-1] // 8) * 8)


def one_bit_adam(
    rate: float,
    replicas: int,
    warmup_steps: int,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    bias_correction: bool = False,
    phase: str = "both",
    compression: Compression | None = None,
) -> Transformation:
    """Adam whose momentum is exchanged as signs after a warm-up; it changes what is computed.

    Args:
        rate: learning rate; the updates are minus it times the direction.
        replicas: k, the leading dim of every gradient, as `per_replica_value_and_grad` makes them.
        warmup_steps: updates of Adam with whole gradients before the variance is frozen; the paper takes 15% to 25% of
            the run.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to its root.
        bias_correction: divide by ``1 - b**t`` as Adam does; the paper does not. That of the variance stays
            as it was when it was frozen.
        phase: "both" decides by the number of the update, in a branch; "warm-up" and "frozen" have no branch. A plan of
            a program with both has to lay gradients out for either; of "frozen" alone it sends nothing but bits.
        compression: C; None takes `Signs`.

    Raises:
        AutoparError: an option is wrong; when called, gradients have no dim of replicas.
    """
    check_replicas(replicas)
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 1:
        raise AutoparError(f"warmup_steps={warmup_steps!r} is not a number of steps", remedy="the variance needs some")

    if phase not in ("both", "warm-up", "frozen"):
        raise AutoparError(f"phase={phase!r} is not a phase of 1-bit Adam", remedy='"both", "warm-up" or "frozen"')

    adam = _OneBitAdam(rate, replicas, warmup_steps, (b1, b2), eps, bias_correction, phase, compression or Signs())
    return Transformation(adam.init, adam.update)


@dataclass(frozen=True)
class _OneBitAdam:
    """Adam whose momentum is exchanged as signs; arguments as of `one_bit_adam`, ``betas`` are both decays."""

    rate: float
    replicas: int
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    bias_correction: bool
    phase: str
    compression: Compression

    def init(self, params: Any) -> OneBitAdamState:
        """Moments and errors of 0."""
        leaves, k = jax.tree.leaves(params), self.replicas
        errors = tuple(jnp.zeros((k, k, _chunk(p.size, k)), p.dtype) for p in leaves)
        return OneBitAdamState(
            tuple(jnp.zeros_like(p) for p in leaves),
            tuple(jnp.zeros_like(p) for p in leaves),
            errors,
            tuple(e[0] for e in errors),
            jnp.zeros((), jnp.int32),
        )

    def update(self, gradients: Any, state: OneBitAdamState, params: Any = None) -> tuple[Any, OneBitAdamState]:
        """Updates from the gradients of all replicas, and the new state."""
        check_stacked(gradients, self.replicas)
        leaves, treedef = jax.tree.flatten(gradients)
        if self.phase == "both":
            warming = state.count < self.warmup_steps
            state = jax.lax.cond(warming, self._warm, self._frozen, tuple(leaves), state)
        else:
            state = (self._warm if self.phase == "warm-up" else self._frozen)(tuple(leaves), state)
        state = replace(state, count=state.count + 1)
        first: Any = 1.0
        second: Any = 1.0
        if self.bias_correction:
            first = 1 - self.betas[0] ** state.count
            second = 1 - self.betas[1] ** jnp.minimum(state.count, self.warmup_steps)
        moments = zip(state.momentum, state.variance, strict=True)
        updates = [-self.rate * (m / first) / (jnp.sqrt(v / second) + self.eps) for m, v in moments]
        return jax.tree.unflatten(treedef, updates), state

    def _warm(self, gradients: tuple[Any, ...], state: OneBitAdamState) -> OneBitAdamState:
        """Adam with the mean gradient."""
        b1, b2 = self.betas
        means = [jnp.mean(g, axis=0) for g in gradients]
        momentum = tuple(b1 * m + (1 - b1) * g for m, g in zip(state.momentum, means, strict=True))
        variance = tuple(b2 * v + (1 - b2) * g * g for v, g in zip(state.variance, means, strict=True))
        return replace(state, momentum=momentum, variance=variance)

    def _frozen(self, gradients: tuple[Any, ...], state: OneBitAdamState) -> OneBitAdamState:
        """The momentum exchanged as signs."""
        b1 = self.betas[0]
        rows = zip(gradients, state.momentum, state.errors, state.server_errors, strict=True)
        exchanged = [_exchanged(b1 * m + (1 - b1) * g, e, d, self.compression) for g, m, e, d in rows]
        momentum, errors, server = (tuple(row[n] for row in exchanged) for n in range(3))
        return replace(state, momentum=momentum, errors=errors, server_errors=server)


def _chunk(size: int, replicas: int) -> int:
    return -(-size // replicas)


def _exchanged(local: Any, error: Any, server_error: Any, c: Compression) -> tuple[Any, Any, Any]:
    """(momentum, errors, errors of the servers) of one parameter, from every replica's own momentum."""
    replicas, shape = local.shape[0], local.shape[1:]
    size, chunk = local[0].size, error.shape[-1]
    valid = (jnp.arange(replicas * chunk) < size).astype(local.dtype).reshape(replicas, chunk)
    flat = jnp.pad(local.reshape(replicas, size), ((0, 0), (0, replicas * chunk - size)))
    carried = flat.reshape(replicas, replicas, chunk) + error
    served = jnp.mean(c.decode(c.encode(carried, valid), valid), axis=0) + server_error
    result = c.decode(c.encode(served, valid), valid)
    errors, server_errors = (x - c.value(x, valid) for x in (carried, served))
    return result.reshape(-1)[:size].reshape(shape), errors * valid, server_errors * valid
