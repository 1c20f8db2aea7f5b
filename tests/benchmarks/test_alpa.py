"""Alpa's GPTs: the search knows the published plans, so that it is never slower."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.published.alpa import Problem, drawn, mixed_step, problem_of, published
from benchmarks.published.transformer import TrainingPlan

#: What a known plan may be faster by, as a share of the step: the search takes the least sum of seconds, re-timing then
#: counts what is hidden. One layer on four V100s was found 0.2% slower than ZeRO-2.
_TOLERANCE = 5e-3


def _small(devices: int) -> Problem:
    """One layer on so many of the node's V100s, with all splits into tp and dp, and ZeRO-2, known."""
    problem = next(drawn(1, 2))
    spec = dataclasses.replace(
        problem.spec, layers=1, hidden=256, ffn=1024, heads=4, kv_heads=4, head_dim=64, vocab=512, seq=128
    )
    named = [TrainingPlan(8, 8 * t // devices, tp=t, dp=devices // t) for t in (1, 2, 4) if t <= devices]
    named += [dataclasses.replace(plan, zero=2) for plan in named if plan.dp > 1]
    group = dataclasses.replace(problem.cluster.groups[0], count=1, devices_per_node=devices)
    cluster = dataclasses.replace(problem.cluster, groups=(group,))
    return Problem(spec, 8, cluster, tuple(named))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_a_found_plan_is_no_slower_than_those_that_are_known(devices):
    problem = _small(devices)
    assert problem.found().step_time <= problem.known_s() * (1 + _TOLERANCE)


@pytest.mark.slow
def test_data_parallelism_that_hides_better_than_the_least_sum_is_found():
    problem = next(p for p in drawn(8, 4) if (p.spec.layers, p.batch, p.cluster.num_devices) == (2, 16, 2))
    assert problem.found().step_time <= problem.known_s() * (1 + _TOLERANCE)


@pytest.mark.slow
def test_the_step_reads_parameters_in_half_width_and_updates_those_in_single():
    step, (state, tokens) = mixed_step(_small(2).spec, 4)
    after, loss = jax.eval_shape(step, state, tokens)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {x.dtype for x in jax.tree.leaves(after["params"])} == {jnp.dtype(jnp.float16)}
    assert {x.dtype for x in jax.tree.leaves(after["master"])} == {jnp.dtype(jnp.float32)}
    assert loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_published_plan_is_within_15_percent_and_the_found_one_no_slower(devices):
    run = next(r for r in published(devices) if r.cluster.num_devices == devices and not r.plans[0].zero)
    problem = problem_of(run)
    known_s = problem.known_s()
    assert known_s == pytest.approx(run.measured_s, rel=0.15)
    assert problem.found().step_time <= known_s * (1 + _TOLERANCE)
