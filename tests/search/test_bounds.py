"""Bounds of plans are true: never above the plan, over all that was free, and said as what they are."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import autopar
from autopar import Plan
from autopar.errors import InfeasiblePlanError
from autopar.plan import Considered
from tests.search.problems import f32, toy


def steps(widths, momentum, batch=16):
    """A train step of a perceptron of such widths whose layers are read more than once, with its arguments."""

    def loss(weights, x):
        for w in weights:
            y = jnp.tanh(x @ w)
            x = y / (1.0 + (y * y).sum(-1, keepdims=True))
        return (x * x).mean()

    def step(state, x):
        weights, moments = state
        grads = jax.grad(loss)(weights, x)
        moments = [momentum * m + g for m, g in zip(moments, grads, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments

    weights = [f32(*shape) for shape in itertools.pairwise(widths)]
    return step, ((weights, weights), f32(batch, widths[0]))


def check_bounds(widths, bandwidth, latency_s, asked, tight, batch=16):
    fn, args = steps(widths, 0.9, batch)
    cluster = toy(4, bandwidth=bandwidth, latency_s=latency_s)
    plan = autopar.parallelize(fn, cluster=cluster, mesh_shape=(2, 2), **asked).plan(*args)
    if tight is not None:
        limit = int(tight * plan.peak_memory)
        plan = autopar.parallelize(fn, cluster=cluster, mesh_shape=(2, 2), memory_limit=limit, **asked).plan(*args)
    assert plan.search.lower_bound <= plan.step_time
    for content in (plan.content, *plan.content.parts):
        assert content.search.lower_bound <= content.step_time
        assert (content.search.sharding_bound or 0.0) <= content.step_time


@pytest.mark.parametrize(
    ("widths", "latency_s", "asked", "tight"),
    [
        ([8, 16], 0.0, {}, None),
        ([8, 8], 0.0, {"num_stages": 1, "remat": "none"}, 0.8),
        ([8, 32, 16], 1e-6, {"num_stages": 1}, None),
        ([16, 8], 1e-6, {"num_stages": 1, "num_microbatches": 1, "remat": "none"}, 0.8),
    ],
)
def test_no_bound_is_above_its_plan(widths, latency_s, asked, tight):
    # Every number of microbatches is tried: a batch of 2 has two.
    check_bounds(widths, 1e6, latency_s, asked, tight, batch=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([8, 16, 32]), min_size=2, max_size=4),
    st.sampled_from([1e6, 1e8]),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from([{}, {"num_stages": 1}, {"num_stages": 1, "num_microbatches": 1, "remat": "none"}]),
    st.sampled_from([None, 0.8]),
)
def test_no_bound_is_above_any_plan(widths, bandwidth, latency_s, asked, tight):
    try:
        check_bounds(widths, bandwidth, latency_s, asked, tight, batch=4)  # with three numbers of microbatches
    except InfeasiblePlanError:
        assert tight is not None
        reject()  # parameters alone need more than that


def test_a_bound_is_over_all_that_was_free():
    """The faster of two plans shows that a bound of the slower one's sharding is none of the step."""
    fn, args = steps([32, 32, 32], 0.9)
    cluster = toy(4, bandwidth=1e6)
    free = autopar.parallelize(fn, cluster=cluster).plan(*args)
    asked = autopar.parallelize(fn, cluster=cluster, num_stages=2, num_microbatches=8).plan(*args)
    single = autopar.parallelize(fn, cluster=cluster, num_stages=1, num_microbatches=1, remat="none").plan(*args)
    assert free.search.lower_bound <= min(asked.step_time, single.step_time)
    # Alone the sharding was free.
    assert single.search.lower_bound == pytest.approx(single.step_time, rel=1e-3)
    assert "search:" in str(free)
    assert "proven optimal for" not in str(free)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (1.0, "proven optimal for its problem"),
        (0.5, "at most 50.00% from the optimum"),
        (0.3, "no useful bound"),
        (None, "no bound"),
    ],
)
def test_what_is_said_of_a_bound(bound, said):
    fn, args = steps([8, 8], 0.9)
    content = (
        autopar.parallelize(fn, cluster=toy(2), num_stages=1, num_microbatches=1, remat="none").plan(*args).content
    )
    search = msgspec.structs.replace(
        content.search,
        lower_bound=None if bound is None else bound * content.step_time,
        considered=(Considered("mesh 2", content.step_time),),
    )
    told = str(Plan(msgspec.structs.replace(content, search=search)))
    (line,) = (line for line in told.splitlines() if line.startswith("search:"))
    assert line.endswith(f"alpa: {said}")


def test_the_sharding_of_a_free_step_has_a_bound_of_its_own():
    fn, args = steps([16, 16], 0.9)
    plan = autopar.parallelize(fn, cluster=toy(1)).plan(*args)
    assert plan.content.search.sharding_bound == pytest.approx(plan.step_time, rel=1e-3)
    assert "for these microbatches its sharding is" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
