"""Microbatches that wait in host memory: a choice of each stage next to recomputation."""

from __future__ import annotations

import dataclasses

import pytest

from autopar import Plan, parallelize, simulate
from autopar.errors import InfeasiblePlanError
from autopar.schedule import Offload
from autopar.simulate.plans import program_of
from examples import mlp
from tests.search.problems import toy

OPTIONS = {"num_stages": 4, "num_microbatches": 8, "schedule": "1f1b", "donate_argnums": 0}


def cluster(bandwidth=1e9, memory=None):
    made = toy(8, bandwidth=1e8)
    (group,) = made.groups
    group = dataclasses.replace(group, host_bandwidth=bandwidth, host_memory_bytes=memory)
    return dataclasses.replace(made, groups=(group,))


@pytest.fixture(scope="module")
def model():
    return mlp.build("tiny", abstract=True, layers=8, batch=512)


@pytest.fixture(scope="module")
def limit(model):
    """Bytes with which microbatches in flight do not fit as they would without a limit."""
    step, args = model
    return int(parallelize(step, cluster=cluster(), remat="none", **OPTIONS).plan(*args).peak_memory * 0.88)


def planned(model, limit, made, **options):
    step, args = model
    return parallelize(step, cluster=made, memory_limit=limit, **{**OPTIONS, **options}).plan(*args)


@pytest.mark.slow
def test_it_is_chosen_where_memory_binds_and_is_faster(model, limit):
    plan = planned(model, limit, cluster(), offload="auto", remat="none")
    assert any(s.form.activations_offloaded for s in plan.stages)
    assert not plan.stages[-1].form.activations_offloaded  # there is never more than one microbatch in flight
    assert plan.peak_memory <= limit
    without = planned(model, limit, cluster(), remat="none")
    assert not any(s.form.activations_offloaded for s in without.stages)
    assert plan.step_time < without.step_time
    assert plan.step_time == simulate(plan).step_time
    program, durations = program_of(plan)
    moved = {i.value.value for w in program.workers for i in w.instructions if isinstance(i, Offload)}
    assert moved == {f"activations@{n}" for n, s in enumerate(plan.stages) if s.form.activations_offloaded}
    for n, s in enumerate(plan.stages):
        if s.form.activations_offloaded:
            assert durations.of_host(f"activations@{n}") == pytest.approx(s.activation_bytes / 1e9)


@pytest.mark.slow
def test_recomputation_and_waiting_on_hosts_are_compared(model, limit):
    fast = planned(model, limit, cluster(1e9), offload="auto")
    slow = planned(model, limit, cluster(1e4), offload="auto")
    without = planned(model, limit, cluster())
    assert any(s.form.activations_offloaded for s in fast.stages)
    assert not any(s.form.activations_offloaded for s in slow.stages)
    assert any(s.form.remat != "none" for s in slow.stages) or slow.step_time > fast.step_time
    assert fast.step_time <= without.step_time


def test_the_memory_of_hosts_bounds_it(model, limit):
    assert not any(
        s.form.activations_offloaded for s in planned(model, limit, cluster(memory=8), offload="auto").stages
    )


def test_without_a_link_to_hosts_it_is_not_offered(model, limit):
    plan = planned(model, limit, toy(8, bandwidth=1e8), offload="auto")
    assert not any(s.form.activations_offloaded for s in plan.stages)
    assert any("no host_bandwidth" in note for note in plan.notes)


def test_less_memory_does(model, limit):
    with pytest.raises(InfeasiblePlanError):
        planned(model, int(limit * 0.85), cluster(), remat="none")
    assert planned(model, int(limit * 0.85), cluster(), remat="none", offload="auto").peak_memory <= limit * 0.85


def test_the_plan_says_it_and_loads_again(model, limit):
    plan = planned(model, limit, cluster(), offload="auto", remat="none")
    assert Plan.from_json(plan.to_json()) == plan
    stage = next(n for n, s in enumerate(plan.stages) if s.form.activations_offloaded)
    assert f"in host memory on stage {stage}" in str(plan)
