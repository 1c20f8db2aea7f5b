"""`autopar.check` finds no difference where there is none, and the operator where there is one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar.api.check import difference
from autopar.sharding.factors import Factor, Rule
from autopar.sharding.registry import register_rule, unregister_rule
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.random_plans import random_plan


def test_a_right_step():
    report = autopar.check(sgd, params(), batch(), cluster=CLUSTER, rate=0.2)
    assert report.ok and report.max_difference < 1e-5 and report.first_operator is None
    assert [leaf.path for leaf in report.leaves] == sorted(
        ["[0]['b']", "[0]['w']", "[1]"], key=lambda p: -next(x.difference for x in report.leaves if x.path == p)
    )
    assert "3 results, all equal" in str(report)
    with pytest.raises(FrozenInstanceError):
        report.program = "other"


def test_a_small_step_is_split_where_nothing_is_asked_for():
    report = autopar.check(sgd, params(), batch())
    assert report.ok and [p.num_microbatches for p in report.plans] == [1, 2]
    assert "tensor parallel" in str(report) and "2 microbatches" in str(report)
    assert autopar.parallelize(sgd).plan(params(), batch()).content.inputs != report.plan.content.inputs


def test_a_step_without_microbatches_is_checked_at_once():
    def centred(x):
        return (x - x.mean(0)) @ x.T

    report = autopar.check(centred, np.random.default_rng(0).standard_normal((16, 8), np.float32))
    assert report.ok and len(report.plans) >= 1


def test_a_decorated_step_and_its_arguments_are_left_alone():
    f = autopar.parallelize(sgd, cluster=CLUSTER, donate_argnums=0)
    p = params()
    assert autopar.check(f, p, batch()).ok
    assert not p["w"].is_deleted()
    with pytest.raises(autopar.AutoparError, match="decorated already"):
        autopar.check(f, p, batch(), mesh_shape=(8,))


def test_modules_are_left_alone():
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    before = np.asarray(model.mean[...])
    assert autopar.check(lambda m, x: m(x), model, jnp.ones((16, 8)), cluster=CLUSTER).ok
    np.testing.assert_array_equal(model.mean[...], before)


@pytest.fixture
def wrong_rule():
    """A rule that lets a cumulative sum be split along itself."""

    def rule(op, types):
        dims = tuple(range(types[0].rank))
        return Rule(tuple(Factor(n) for n in types[0].shape), (dims,), (dims,))

    register_rule("cumsum", rule)
    yield
    unregister_rule("cumsum")


def step(x, w):
    y = jnp.tanh(x @ w)
    z = jnp.cumsum(y, axis=0)
    return {"z": z, "y": y, "late": jnp.sin(z).sum()}


def test_a_wrong_step(wrong_rule):
    rng = np.random.default_rng(0)
    args = jnp.asarray(rng.standard_normal((16, 8))), jnp.asarray(rng.standard_normal((8, 8)))
    for seed in range(10):
        report = autopar.check(step, *args, cluster=CLUSTER, search=random_plan(seed), mesh_shape=(8,))
        if not report.ok:
            break
    assert report.first_operator.primitive == "cumsum"
    assert "test_check.py" in report.first_operator.source
    assert report.max_difference > 0.01
    assert {leaf.path: leaf.ok for leaf in report.leaves}["['y']"]
    text = str(report)
    assert "first operator that differs: cumsum.0 (cumsum) at test_check.py" in text and "! ['z']" in text


def test_differences():
    nan = np.array([1.0, np.nan, np.inf])
    assert difference(nan, nan).relative == 0
    assert difference(nan, np.ones(3)).relative == np.inf
    assert difference(np.array([1, 2]), np.array([1, 3])).relative == np.inf
    assert difference(np.array([3.0, 4.5]), np.array([3.0, 4.0])).relative == pytest.approx(0.1)
    assert difference(jax.random.key(1), jax.random.key(1)).relative == 0
    assert difference(np.ones(2, np.float32), np.ones(2)).relative == np.inf


def test_keys_and_half_precision():
    def step(key, x):
        return jax.random.split(key)[0], x * jax.random.normal(key, x.shape, x.dtype)

    assert autopar.check(step, jax.random.key(0), jnp.ones((8, 4), jnp.bfloat16), cluster=CLUSTER).ok
