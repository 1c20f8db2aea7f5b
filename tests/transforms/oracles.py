"""Oracles of every technique that reads old parameters: replay, the stability limit, a harness of delayed gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def replay(
    gradients: Callable[[Any, Any], Any],
    update: Callable[[Any, Any], Any],
    state: Any,
    batches: Sequence[Sequence[Any]],
    version: Callable[[int], int],
    parameters: Callable[[Any], Any] = lambda state: state,
) -> list[Any]:
    """States after each step of a single device that follows a version map.

    Args:
        gradients: G(parameters, microbatch).
        update: U(state, mean gradient).
        state: the first one; its parameters are version 0.
        batches: by step the microbatches.
        version: from the number of a microbatch, counted from 1 over all steps, to the version that both of its
            passes read.
        parameters: those of a state.
    """
    versions, states = [parameters(state)], []
    count = 0
    for microbatches in batches:
        total = None
        for microbatch in microbatches:
            count += 1
            g = gradients(versions[version(count)], microbatch)
            total = g if total is None else jax.tree.map(jnp.add, total, g)
        count_of_step = len(microbatches)
        state = update(state, jax.tree.map(lambda t, n=count_of_step: t / n, total))
        versions.append(parameters(state))
        states.append(state)
    return states


def version_2bw(microbatch: int, microbatches: int) -> int:
    """PipeDream-2BW's map: ``max(floor((k-1)/m) - 1, 0)``."""
    return max((microbatch - 1) // microbatches - 1, 0)


def stability_limit(delay: int) -> float:
    """The largest ``rate * curvature`` with which SGD at a constant delay converges on a quadratic."""
    return 2 * math.sin(math.pi / (4 * delay + 2))


def converges(step: Callable[[Any], Any], state: Any, steps: int, read: Callable[[Any], Any]) -> bool:
    """Whether ``|read(state)|`` falls over ``steps`` steps: the second half stays below the first.

    Raises:
        AssertionError: it neither falls nor grows enough to tell.
    """

    def body(state: Any, _: None) -> tuple[Any, Any]:
        new = step(state)
        return new, jnp.abs(read(new))

    _, sizes = jax.jit(lambda s: jax.lax.scan(body, s, None, length=steps))(state)
    first, second = float(jnp.max(sizes[: steps // 2])), float(jnp.max(sizes[steps // 2 :]))
    assert not 0.8 < second / first < 1.25, "run more steps"
    return second < first


class Transformation(NamedTuple):
    """Two functions as optax has them."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


def delay_harness(inner: Any, delay: int) -> Transformation:
    """An optimizer that is fed the gradients of ``delay`` updates ago, zeros at first; 0 is ``inner``."""

    def init(params: Any) -> Any:
        queue = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(delay))
        return queue, inner.init(params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        queue, own = state
        unauthenticated = (*queue, grads)
        updates, own = inner.update(unauthenticated[0], own, params)
        return updates, (unauthenticated[1:], own)

    return Transformation(init, update)
