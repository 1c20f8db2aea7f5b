"""No pipeline is planned where parameters, optimizer state and gradients do not fit all devices together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.ir.analysis import gradient_bytes, state_bytes
from autopar.search.one_stage import OneStagePlanner
from autopar.search.stage_regions import StageRegions
from examples import gpt, mlp
from tests.search.problems import problem_of, toy


@dataclass(frozen=True)
class _Floor:
    """Bytes a device: of parameters and optimizer state, and with gradients."""

    state: int
    with_gradients: int


def _floor(step: Any, args: tuple[Any, ...], devices: int) -> _Floor:
    graph = problem_of(step, args, toy(devices)).graph
    state = state_bytes(graph)
    return _Floor(-(-state // devices), -(-(state + gradient_bytes(graph)) // devices))


_STEPS = {
    "mlp": lambda: mlp.build(layers=4, abstract=True),
    "gpt": lambda: gpt.build(abstract=True, layers=1),
    "gpt in a loop": lambda: gpt.build(abstract=True, layers=2, scan=True),
}


@pytest.mark.parametrize("name", _STEPS)
def test_pipelines_hold_no_less(name: str) -> None:
    step, args = _STEPS[name]()
    floor = _floor(step, args, 4)
    parallel = autopar.parallelize(
        step, cluster=toy(4), num_stages=2, num_microbatches=2, remat="full", donate_argnums=0
    )
    assert parallel.plan(*args).peak_memory >= floor.with_gradients


@pytest.mark.parametrize("name", _STEPS)
@pytest.mark.parametrize("is_below", (False, True))
def test_a_limit_below_closes_pipelines_before_any_is_planned(
    name: str, is_below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = _STEPS[name]()
    floor = _floor(step, args, 4)
    limit = (floor.state + floor.with_gradients) // 2 if is_below else floor.with_gradients + 1
    tried: list[object] = []

    class Tried(Exception):
        """Ends a search that tries pipelines."""

    def pipelines(self: StageRegions, *_: object) -> None:
        tried.append(self)
        raise Tried

    monkeypatch.setattr(StageRegions, "pipelines", pipelines)
    monkeypatch.setattr(OneStagePlanner, "best", lambda self, *_: (_ for _ in ()).throw(InfeasiblePlanError("one")))
    with pytest.raises(InfeasiblePlanError if is_below else Tried):
        autopar.parallelize(step, cluster=toy(4), memory_limit=limit, donate_argnums=0).plan(*args)
    assert bool(tried) != is_below


def test_gradients_of_fewer_bits_are_counted_as_such() -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights.astype(jnp.float32)) ** 2)

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(loss)(weights.astype(jnp.bfloat16), x)
        return weights - 0.1 * gradient.astype(jnp.float32)

    args = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert gradient_bytes(problem_of(step, args, toy(2)).graph) == 2 * 64 * 64


def test_parameters_that_are_not_updated_have_none() -> None:
    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        frozen, trained = state

        def loss(trained: jax.Array) -> jax.Array:
            return jnp.mean((x @ frozen @ trained) ** 2)

        return frozen, trained - 0.1 * jax.grad(loss)(trained)

    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    args = ((matrix, matrix), jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert gradient_bytes(problem_of(step, args, toy(2)).graph) == 4 * 64 * 64
