"""`loss_scaled`: the loss times a power of two that follows the gradients, for float16.

    g = G(S * loss, W) / S;   all finite: W, opt = U(W, opt, g), and S *= growth after `interval` such steps in a row;
    else: the state stays as it was and S *= backoff

Micikevicius et al., "Mixed precision training" (ICLR'18), section 3.2; defaults as flax's ``DynamicScale``. The scale
multiplies the cotangent with which the backward pass begins: the step stays as it is. A gradient of 2^-27, which
float16 flushes to 0, is 2^-12 on its way at S = 2^15. Powers of two change no bit of a gradient that neither
overflows nor underflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError, TraceError
from autopar.transforms.split import split
from autopar.transforms.state import new_state_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledState:
    """The state of a step with a scaled loss; checkpoints hold all of it.

    Args:
        state: the plain step's state.
        scale: S, a float32 scalar.
        good_steps: steps without an overflow since S changed, an int32 scalar.
        skipped: updates that were left out so far, an int32 scalar.
    """

    state: Any
    scale: Any
    good_steps: Any
    skipped: Any


@dataclass(frozen=True)
class LossScaled:
    """A step with a scaled loss; made by `loss_scaled`.

    Args:
        step: the plain step.
        scale: S at first.
        growth: what S is multiplied by after ``interval`` good steps.
        backoff: what S is multiplied by after an overflow.
        interval: good steps until S grows.
        least: S does not fall below it.
    """

    step: Callable[..., Any]
    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 2.0**-126

    def __post_init__(self) -> None:
        for name in ("scale", "growth", "backoff", "least"):
            value = getattr(self, name)
            if not value > 0 or math.frexp(value)[0] != 0.5:
                raise AutoparError(f"{name}={value!r} is not a power of two", remedy="powers of two round no gradient")
        if self.growth < 1 or self.backoff > 1 or self.interval < 1:
            raise AutoparError(
                f"growth={self.growth!r}, backoff={self.backoff!r}, interval={self.interval!r}",
                remedy="growth of at least 1, backoff of at most 1, an interval of at least one step",
            )

    @property
    def __name__(self) -> str:
        return f"loss_scaled_{getattr(self.step, '__name__', 'step')}"

    def init(self, state: Any) -> ScaledState:
        """State before the first step."""
        return ScaledState(state, jnp.float32(self.scale), jnp.int32(0), jnp.int32(0))

    def __call__(self, state: ScaledState, *args: Any, **kwargs: Any) -> Any:
        """One step: what the plain step returns, with a `ScaledState` in place of its state.

        Raises:
            TraceError: the backward pass does not begin with the cotangent 1, as that of `jax.grad` does.
        """
        cut = split(partial(self.step, **kwargs), (state.state, *args))
        if not cut.seeds or not cut.backward:
            raise TraceError(
                "no backward pass that begins with the cotangent 1 reaches the update, so its loss cannot be scaled",
                cause="gradients are computed inside a loop, or by jax.vjp with another cotangent",
                remedy="differentiate the loss outside of loops with jax.grad or jax.value_and_grad",
            )
        leaves = jax.tree.leaves((state.state, *args))
        scaled = cut.gradients(leaves, state.scale)
        inverse = 1 / state.scale
        crossing = [
            x * inverse.astype(x.dtype) if n in cut.backward and _is_float(x) else x
            for n, x in zip(cut.crossing, scaled, strict=True)
        ]
        gradients = [x for n, x in zip(cut.crossing, crossing, strict=True) if n in cut.backward and _is_float(x)]
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in gradients]).all()
        result = cut.update(leaves, crossing)
        return self._joined(state, result, finite)

    def _joined(self, state: ScaledState, result: Any, finite: Any) -> Any:
        new, metrics = new_state_of(state.state, result)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state.state)
        good = jnp.where(finite, state.good_steps + 1, 0)
        grows = good >= self.interval
        fallen = jnp.maximum(state.scale * self.backoff, self.least)
        grown = jnp.where(grows, state.scale * self.growth, state.scale)
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        scale = jnp.where(finite, grown, fallen)
        after = ScaledState(
            kept,
            scale.astype(jnp.float32),
            jnp.where(grows, 0, good).astype(jnp.int32),
            state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
        )
        return after if metrics is None else (after, *metrics)


def loss_scaled(
    step: Callable[..., Any] | None = None,
    *,
    scale: float = 65536.0,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
) -> Any:
    """A step whose loss is scaled, and which skips updates with gradients that are not finite.

    Args:
        step: a plain train step ``step(state, *batch) -> (state, *metrics)`` or ``-> state`` that differentiates by
            `jax.grad` or its kin; None to use as ``@loss_scaled(interval=100)``. Its metrics are those of the plain
            step, gradients among them divided by S.
        scale: S at first; a power of two, as the next two.
        growth: what S is multiplied by after ``interval`` good steps in a row.
        backoff: what S is multiplied by after an overflow.
        interval: steps.

    Returns:
        A `LossScaled`: ``init(state)``, and a call like that of ``step`` on what ``init`` returned; the plain state is
        its ``.state``. With ``autopar.parallelize(..., precision="f16")`` the backward pass is in float16.

    Raises:
        AutoparError: an option is wrong.
    """
    make = partial(LossScaled, scale=scale, growth=growth, backoff=backoff, interval=interval)
    return make if step is None else make(step)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
