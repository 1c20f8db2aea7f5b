"""Corrections of gradients and rates for the age of what they are of. At no age each is the identity, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autopar.errors import AutoparError


def dc_asgd(strength: float = 0.04) -> Callable[[Any, Any, Any], Any]:
    """``g + strength * g * g * (now - read)``, elementwise: a first-order correction (Zheng et al., ICML'17, eq. 10).

    The outer product of gradients stands for the Hessian, of which the diagonal is taken.

    Args:
        strength: the paper's lambda.
    """

    def correct(gradient: Any, now: Any, read: Any) -> Any:
        return gradient + strength * gradient * gradient * (now - read)

    return correct


@dataclass(frozen=True)
class Extrapolated:
    """Reads ``W + horizon * (W - W before)``: the last step goes on for some steps more.

    With SGD the difference of two versions is the step that the optimizer took, its momentum in it (SpecTrain, Chen et
    al. 2018; XPipe, Guan et al. 2019). The papers' horizon is the delay. On a quadratic and with plain SGD that lowers
    the largest stable rate (delay 3: 0.266 instead of 0.445), and half a step raises it (0.465).

    Args:
        horizon: steps to go on.
    """

    horizon: float
    further: int = 1

    def __call__(self, versions: Sequence[Any]) -> Any:
        """The leaf to read, from its versions: the oldest first, last the one that is read without a correction."""
        before, last = versions
        return last + self.horizon * (last - before)


def pipemare_rate(rate: float, delay: int, warmup_steps: int) -> Callable[[Any], Any]:
    """Rates ``rate / delay**(1 - min(t / warmup_steps, 1))``: small until the loss is smooth (PipeMare, eq. 5).

    Args:
        rate: the synchronous step's rate.
        delay: steps between reading parameters and applying their gradient; 0 and 1 change nothing.
        warmup_steps: steps until the full rate.

    Returns:
        A function of the number of the step, as optimizers take it for a schedule.
    """
    if warmup_steps < 1:
        raise AutoparError(f"warmup_steps={warmup_steps!r} is less than one step", remedy="give a positive number")

    def schedule(step: Any) -> Any:
        left = 1.0 - jnp.minimum(step / warmup_steps, 1.0)
        return rate * jnp.asarray(max(delay, 1), jnp.result_type(float)) ** -left

    return schedule


def staleness_aware_rate(rate: float, delay: Any) -> Any:
    """``rate / max(delay, 1)``: of an update that is ``delay`` versions old (Zhang et al., IJCAI'16, eq. 5)."""
    return rate / jnp.maximum(delay, 1)
