"""The first pipeline of a large step: even stages that fit, known before others are ranked."""

from __future__ import annotations

import pytest

import autopar
from autopar.search.anytime import Incumbent
from autopar.search.pipeline.relaxed_pipelines import RelaxedPipelines, may_gain
from autopar.search.policy import SearchPolicy, SizePolicy
from examples import mlp
from tests.search.problems import toy, with_policy

#: Every step is as a large one.
LARGE = SearchPolicy(sizes=SizePolicy(tiny_operators=0, few_operators=0, small_operators=0))
NODES = SearchPolicy(sizes=SizePolicy(tiny_operators=0, few_operators=0, small_operators=0, large_nodes=2))


def planned(policy, devices=4, nodes=2, memory=150_000, **options):
    fn, args = mlp.build(abstract=True, layers=4, hidden=64, batch=64)
    cluster = toy(devices, nodes=nodes, bandwidth=1e7, memory=memory)
    parallel = autopar.parallelize(fn, cluster=cluster, donate_argnums=0, **options)
    return with_policy(parallel, policy).plan(*args)


@pytest.fixture
def offered(monkeypatch):
    """Plans in the order in which they become known."""
    plans = []
    offer = Incumbent.offer

    def note(self, plan):
        plans.append(plan)
        offer(self, plan)

    monkeypatch.setattr(Incumbent, "offer", note)
    return plans


@pytest.mark.slow
def test_without_time_even_stages_are_the_answer_and_with_it_nothing_slower(offered):
    hasty = planned(LARGE, time_limit_s=0)
    assert hasty.num_stages > 1 and len(offered) == 1
    sizes = {len(stage.devices) for stage in hasty.stages}
    assert sizes == {4 // hasty.num_stages} and hasty.peak_memory <= 150_000
    assert any("ended by its time limit" in note for note in hasty.notes)
    offered.clear()
    whole = planned(LARGE)
    assert offered[0].step_time == hasty.step_time
    assert whole.step_time <= hasty.step_time
    assert whole.search.lower_bound <= whole.step_time


def test_on_a_large_cluster_even_stages_come_before_one_stage_where_memory_is_short(offered):
    whole = planned(NODES, devices=8, nodes=4, memory=60_000)
    first = offered[0]
    assert first.num_stages > 1 and {len(s.devices) for s in first.stages} == {8 // first.num_stages}
    assert whole.step_time <= min(plan.step_time for plan in offered)


@pytest.mark.slow
def test_what_does_not_fit_is_left_to_the_search(offered):
    fits = planned(LARGE)
    tight = planned(LARGE, memory=int(0.9 * fits.peak_memory))
    assert tight.peak_memory <= 0.9 * fits.peak_memory


def test_an_even_pipeline_is_planned_as_often_as_its_stages_differ():
    fn, args = mlp.build(abstract=True, layers=8, hidden=64, batch=64)
    told: list[str] = []
    cluster = toy(4, nodes=4, bandwidth=1e7, memory=250_000)
    free = autopar.parallelize(fn, cluster=cluster, donate_argnums=0, progress=told.append, time_limit_s=0)
    plan = with_policy(free, LARGE).plan(*args)
    assert plan.num_stages == 4
    assert 1 <= sum("planning stage" in line for line in told) <= 3


def test_relaxations_say_which_candidate_is_planned_exactly(offered, monkeypatch):
    made = {}
    add = RelaxedPipelines.add

    def note(self, *some):
        add(self, *some)
        made.update((id(plan), (plan, candidate)) for plan, candidate in self.plans)

    monkeypatch.setattr(RelaxedPipelines, "add", note)
    plan = planned(LARGE, devices=8, nodes=4, memory=400_000, schedule="1f1b")
    fastest, candidate = min(made.values(), key=lambda known: known[0].step_time)
    assert plan.step_time <= fastest.step_time
    assert (plan.num_stages, plan.num_microbatches) == (len(candidate.members), candidate.count)
    steps = {c.count: plan for plan, c in made.values() if c.members == candidate.members}
    for count in (candidate.count // 2, 2 * candidate.count):  # where possible
        may = may_gain(fastest, candidate, count, steps, LARGE.effort.least_gain)
        assert count in steps or count > 64 or count < 4 or not may


@pytest.mark.slow
def test_what_a_relaxation_plans_fits(offered):
    planned(LARGE, devices=8, nodes=4, memory=150_000)
    pipelines = [plan for plan in offered if plan.num_stages > 1]
    assert len(pipelines) > 1 and all(plan.peak_memory <= 150_000 for plan in pipelines)
