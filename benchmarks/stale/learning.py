"""Losses of runs whose gradients read older versions, and of replicas that agree every few steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.transforms import diloco, local_sgd
from benchmarks.stale.tasks import Task

#: Replicas of local SGD and DiLoCo.
REPLICAS = 4
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9


def begun(task: Task, seeds: Any, updates: int) -> tuple[Any, Any]:
    """(parameters, batches of all updates), each with a leading dim of seeds; apart, as drawing is slow to compile."""

    def one(seed: Any) -> tuple[Any, Any]:
        first, data = jax.random.split(jax.random.key(seed))
        keys = jax.vmap(lambda t: jax.random.fold_in(data, t))(jnp.arange(updates))
        return task.init(first), jax.vmap(task.batch)(keys)

    params, batches = jax.jit(jax.vmap(one))(jnp.asarray(seeds))
    return params, batches


def learner(task: Task, ring: int, updates: int, every: int) -> Callable[[Any, Any], Any]:
    """A function ``(ages, begun) -> losses on what is held out``, compiled once for each number of runs.

    Ages are ``[delays, seeds, updates, layers]``, updates between the version of a layer that a gradient reads and the
    newest; losses are ``[delays, seeds, updates // every]``.

    Args:
        task: what is learned.
        ring: versions that are kept: more than the largest age.
        updates: of a run.
        every: updates between two measurements; divides them.
    """
    numbers = jnp.arange(updates).reshape(-1, every)
    seeds = jax.vmap(partial(_run, task, ring), in_axes=(0, 0, 0, None))
    run = jax.jit(jax.vmap(seeds, in_axes=(None, None, 0, None)))

    def losses(ages: Any, begun: tuple[Any, Any]) -> Any:
        assert np.max(ages) < ring, "older versions are gone"
        chunks = jnp.asarray(ages).reshape(*ages.shape[:2], updates // every, every, -1)
        params, batches = begun
        batches = jax.tree.map(lambda x: x.reshape(x.shape[0], updates // every, every, *x.shape[2:]), batches)
        return np.asarray(run(params, batches, chunks, numbers))

    return losses


def _run(task: Task, ring: int, params: Any, batches: Any, ages: Any, numbers: Any) -> Any:
    versions = jax.tree.map(lambda x: jnp.broadcast_to(x, (ring, *x.shape)), params)

    def update(carry: Any, at: Any) -> Any:
        (params, opt, versions), (t, age, batch) = carry, at
        read = [jax.tree.map(lambda x, n=n: x[(t - age[n]) % ring], v) for n, v in enumerate(versions)]
        grads = jax.grad(task.loss)(read, batch)
        updates, opt = task.optimizer.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        versions = jax.tree.map(lambda v, x: v.at[(t + 1) % ring].set(x), versions, params)
        return (params, opt, versions), None

    def measured(carry: Any, at: Any) -> Any:
        carry, _ = jax.lax.scan(update, carry, at)
        return carry, task.loss(carry[0], task.held_out)

    return jax.lax.scan(measured, (params, task.optimizer.init(params), versions), (numbers, ages, batches))[1]


def agreed(task: Task, kind: str, period: int, begun: tuple[Any, Any], every: int) -> Any:
    """Losses of the mean of the replicas, ``[seeds, steps]``; a step takes as many batches as there are replicas.

    Args:
        task: what is learned.
        kind: "local SGD" or "DiLoCo".
        period: H, inner steps between two exchanges.
        begun: parameters and batches; `REPLICAS` divides their number.
        every: batches between two measurements; `REPLICAS` divides it.
    """

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(task.loss)(state["params"], batch)
        changes, opt = task.optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], changes), "opt": opt}, value

    make: Callable[..., Any] = local_sgd
    if kind == "DiLoCo":
        make = partial(diloco, outer_rate=_OUTER_RATE, outer_momentum=_OUTER_MOMENTUM)
    outer = make(step, REPLICAS, period)

    def run(params: Any, batches: Any) -> Any:
        state = outer.init({"params": params, "opt": task.optimizer.init(params)})

        def measured(state: Any, batches: Any) -> Any:
            state, _ = jax.lax.scan(lambda s, batch: (outer(s, batch)[0], None), state, batches)
            mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), state.replicas["params"])
            return state, task.loss(mean, task.held_out)

        return jax.lax.scan(measured, state, batches)[1]

    def grouped(x: Any) -> Any:
        seeds, updates, size, *rest = x.shape
        return x.reshape(seeds, updates // every, every // REPLICAS, REPLICAS * size, *rest)

    params, batches = begun
    return np.asarray(jax.jit(jax.vmap(run))(params, jax.tree.map(grouped, batches)))
