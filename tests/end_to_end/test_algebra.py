"""Low-rank factors next to frozen weights on eight devices: values, what travels, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.errors import AutoparError
from autopar.lower.hlo import collectives
from tests.search.problems import toy

LAYERS, RANK = 2, 2


def train_step(merged: bool) -> Callable[..., Any]:
    """A step of stochastic gradient descent on the factors, with the weight merged or as it is written by hand."""

    def loss(factors: Any, frozen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for (a, b), w in zip(factors, frozen, strict=True):
            x = jnp.tanh(x @ (w + 0.5 * (a @ b)) if merged else x @ w + 0.5 * ((x @ a) @ b))
        return jnp.mean((x - y) ** 2)

    def step(factors: Any, frozen: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(factors, frozen, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, factors, grads), value

    return step


def arguments(width: int, examples: int) -> tuple[Any, ...]:
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / width**0.5)

    factors = [(drawn(width, RANK), drawn(RANK, width)) for _ in range(LAYERS)]
    return factors, [drawn(width, width) for _ in range(LAYERS)], drawn(examples, width), drawn(examples, width)


def parallel(merged: bool, **options: Any) -> Any:
    given = {"cluster": toy(8), "num_stages": 1, "num_microbatches": 1, "remat": "none", **options}
    return parallelize_with(train_step(merged), ParallelOptions(**given))


def sent(compiled: Any) -> float:
    """Bytes of full tensors in all collectives of a compiled program."""
    return sum(c.full_bytes * c.times for c in collectives(compiled.as_text()))


def test_merged_weights_send_what_the_form_by_hand_sends() -> None:
    with jax.enable_x64(True):
        args = arguments(64, 64)
        step, by_hand = (parallel(merged).compile(*args) for merged in (True, False))
        want = jax.jit(train_step(True))(*args)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-12, 1e-14), step(*args), want)
        written = parallel(True, rewrites=False).plan(*args)
    assert sent(step) <= 1.1 * sent(by_hand)
    assert sent(step) < 0.5 * sum(c.bytes * c.count for c in written.communication)
    assert step.plan.step_time <= 1.01 * by_hand.plan.step_time
    assert step.plan.step_time < written.step_time
    assert len(step.plan.rewrites) == 2
    told = " ".join(str(step.plan).split())
    assert all(" ".join(line.split()) in told for line in step.plan.rewrites)
    assert written.rewrites == by_hand.plan.rewrites == ()


def test_plans_run_in_the_form_that_they_were_made_for(tmp_path: Path) -> None:
    """A plan of the function as it is written, and one with rewrites, are each taken without saying so."""
    with jax.enable_x64(True):
        args = arguments(16, 16)
        for rewrites in (False, True):
            path = tmp_path / f"{rewrites}.json"
            plan = parallel(True, rewrites=rewrites).plan(*args)
            assert bool(plan.rewrites) is rewrites
            plan.save(path)
            loaded = autopar.Plan.load(path)
            assert loaded.rewrites == plan.rewrites
            parallel(True, plan=loaded).plan(*args)


def test_no_switch_but_true_and_false() -> None:
    with pytest.raises(AutoparError, match="rewrites='no' is neither True nor False"):
        parallel(True, rewrites="no")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": 4},
        {"num_stages": 2, "num_microbatches": 4},
        {"num_stages": 2, "num_microbatches": 2, "schedule": "zb-h1"},
        {"remat": "full"},
    ],
    ids=str,
)
def test_rewritten_steps_run_in_microbatches_and_stages(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        step, args = parallel(True, **options), arguments(32, 64)
        assert step.plan(*args).rewrites
        factors, frozen, x, y = args
        for _ in range(2):
            wanted, loss = jax.jit(train_step(True))(*jax.device_get((factors, frozen, x, y)))
            factors, value = step(factors, frozen, x, y)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), (factors, value), (wanted, loss)
            )
