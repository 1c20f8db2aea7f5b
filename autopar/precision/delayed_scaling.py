"""`delayed_scaling`: products in 8 bits whose scales follow the largest elements of earlier steps (delayed scaling).

    scale_k = top / max(history_k) / 2^margin,  history_k <- (max|x_k|, history_k without its last)

Micikevicius et al., "FP8 formats for deep learning", 2022, with the defaults of flax's ``Fp8DotGeneral``: the scale
stays as it was where the largest element of all is 0 or not finite. With a scale that is known beforehand a tensor is
rounded as it is made; scales of the step itself (``precision="f8"``) read each tensor twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError
from autopar.precision.eight_bits import DelayedScales, scale_for
from autopar.precision.policy import Precision
from autopar.precision.rewrite import results_of
from autopar.transforms.state import new_state_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EightBitState:
    """The state of a step with delayed scales; checkpoints hold all of it.

    Args:
        state: the plain step's state.
        scales: of the operands of products in the order of the program, float32[operands].
        history: their largest elements, the last step's first, float32[operands, steps].
    """

    state: Any
    scales: Any
    history: Any


@dataclass(frozen=True)
class DelayedScaling:
    """A step with delayed scales; made by `delayed_scaling`.

    Args:
        step: the plain step.
        history: steps whose largest elements count.
        margin: powers of two by which scales are smaller than what would do.
        precision: what else computes narrow.
    """

    step: Callable[..., Any]
    history: int = 1024
    margin: int = 0
    precision: Precision = field(default_factory=lambda: Precision("f8"))

    def __post_init__(self) -> None:
        if self.history < 1 or self.precision.compute != "f8":
            raise AutoparError(
                f"history={self.history!r}, precision={self.precision.compute!r}",
                remedy='a history of at least one step, Precision("f8")',
            )

    @property
    def __name__(self) -> str:
        return f"delayed_scaling_{getattr(self.step, '__name__', 'step')}"

    def init(self, state: Any, *args: Any) -> EightBitState:
        """The first state: all scales 1.

        Args:
            state: the plain step's.
            args: its other arguments, of which the shapes count.
        """
        counted = DelayedScales(None)
        jax.eval_shape(lambda *a: self._run(counted, *a), state, *args)
        count = len(counted.tops)
        return EightBitState(state, jnp.ones(count, jnp.float32), jnp.zeros((count, self.history), jnp.float32))

    def __call__(self, state: EightBitState, *args: Any) -> Any:
        """One step: what the plain step returns, with an `EightBitState` in place of its state."""
        used = DelayedScales(state.scales)
        result = self._run(used, state.state, *args)
        if len(used.amaxes) != state.scales.shape[0]:
            raise AutoparError(
                f"the step has {len(used.amaxes)} operands of products, its state scales of {state.scales.shape[0]}",
                remedy="init with arguments of the shapes of the call",
            )
        history, scales = state.history, state.scales
        if used.amaxes:
            history = jnp.concatenate([jnp.stack(used.amaxes)[:, None], history[:, :-1]], axis=1)
            tops = jnp.asarray(used.tops, jnp.float32) * 2.0**-self.margin
            scales = scale_for(jnp.max(history, axis=1), tops, scales)
        new, metrics = new_state_of(state.state, result)
        after = EightBitState(new, scales, history)
        return after if metrics is None else (after, *metrics)

    def _run(self, scales: DelayedScales, state: Any, *args: Any) -> Any:
        """The results of the plain step, its products in 8 bits."""
        closed, shape = jax.make_jaxpr(self.step, return_shape=True)(state, *args)
        leaves, rest = jax.tree.leaves(state), jax.tree.leaves(args)
        parameters = [True] * len(leaves) + [False] * len(rest)
        results = results_of(self.precision, closed, parameters, [*leaves, *rest], scales)
        return jax.tree.unflatten(jax.tree.structure(shape), results)


def delayed_scaling(
    step: Callable[..., Any] | None = None,
    *,
    history: int = 1024,
    margin: int = 0,
    precision: Precision | None = None,
) -> Any:
    """A step whose products take operands in 8 bits, with scales from earlier steps.

    Args:
        step: a plain float32 step ``step(state, *batch) -> (state, *metrics)`` or ``-> state``; None to use as a
            decorator with arguments.
        history: steps whose largest elements count.
        margin: powers of two by which scales are smaller than what would do.
        precision: ``Precision("f8", ...)`` with another table of what stays wide.

    Returns:
        A `DelayedScaling`: ``init(state, *batch)``, and a call like that of ``step`` on what ``init`` returned; the
        plain state is its ``.state``.

    Raises:
        AutoparError: an option is wrong.
    """
    make = partial(DelayedScaling, history=history, margin=margin, precision=precision or Precision("f8"))
    return make if step is None else make(step)
