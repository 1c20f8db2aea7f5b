"""What a plan says of splitting the backward pass, and of computing the forward pass again where memory is short."""

from __future__ import annotations

import msgspec
import pytest

import autopar
from autopar import InfeasiblePlanError
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.plan import Considered
from autopar.search.alpa import alpa
from autopar.search.outcome import Bounded
from autopar.search.pipeline.stage import limit_is_negligible
from autopar.search.policy import EffortPolicy
from examples import mlp
from tests.search.problems import problem_of, problem_with

NEGLIGIBLE = EffortPolicy().gap
SHAPE = {"layers": 8, "hidden": 64, "batch": 1024}


def cluster(memory=10**9):
    device = Device("toy", memory, 1e12, (("f32", 2e9),))
    return Cluster("toy", (NodeGroup(1, 2, device, LinkSpec(1e9, 1e-7), "intra"),))


def plan(memory=10**9, remat="auto", **options):
    fn, args = mlp.build(abstract=True, **SHAPE)
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe", **options}
    return autopar.parallelize(fn, cluster=cluster(memory), remat=remat, **options).plan(*args)


def test_weight_gradients_take_what_they_take():
    found = plan(schedule="zb-h1", remat="none")
    works = {(w.kind, w.stage): w.seconds for w in found.content.pipeline.works}
    for n, stage in enumerate(found.stages):
        backward = dict(stage.work_times)["backward"] / found.num_microbatches
        assert works["backward", n] + works["weight", n] == pytest.approx(backward)
    # No stage waits for what the first one computes; half of the products of the last are cotangents.
    assert works["backward", 0] == pytest.approx(0.0, abs=1e-12)
    assert 0 < works["weight", 1] < works["backward", 1] + works["weight", 1]


def test_nothing_is_computed_anew_without_need():
    assert {s.form.remat for s in plan().stages} == {"none"}


@pytest.mark.slow
def test_a_person_names_it():
    found = plan(search=autopar.search.Manual(pp=2, recompute="full"), num_stages="auto", schedule="auto")
    assert [s.form.remat for s in found.stages] == ["full", "full"]
    assert all(
        0 < s.activation_bytes < t.activation_bytes
        for s, t in zip(found.stages[1:], plan(remat="none").stages[1:], strict=True)
    )


@pytest.mark.slow
def test_memory_is_traded_for_time():
    kept = plan(remat="none")
    all_anew = plan(remat="full")
    assert all_anew.peak_memory < kept.peak_memory and all_anew.step_time > kept.step_time
    limit = (all_anew.peak_memory + kept.peak_memory) // 2
    with pytest.raises(InfeasiblePlanError):
        plan(memory=limit, remat="none")
    chosen = plan(memory=limit)
    assert chosen.peak_memory <= limit
    assert any(s.form.remat != "none" for s in chosen.stages)
    assert kept.step_time <= chosen.step_time <= all_anew.step_time * (1 + 1e-9)


@pytest.mark.slow
def test_more_memory_is_never_slower():
    kept, all_anew = plan(remat="none"), plan(remat="full")
    least = plan(memory=all_anew.peak_memory + (kept.peak_memory - all_anew.peak_memory) // 8)
    for part in range(1, 8):
        limit = all_anew.peak_memory + (kept.peak_memory - all_anew.peak_memory) * part // 8
        chosen = plan(memory=limit)
        assert chosen.step_time <= least.step_time * (1 + 1e-3)  # stages agree on layouts after each is chosen
        least = chosen


def test_a_limit_that_costs_nothing_is_no_reason_to_compute_anew():
    fn, args = mlp.build(abstract=True, **SHAPE)
    content = alpa(problem_of(fn, args, cluster())).content

    def says(sum_s, least_s, hidden_s=0.0):
        considered = (Considered("mesh 4", sum_s, None, "chosen"),)
        objective = sum_s + hidden_s
        search = msgspec.structs.replace(
            content.search, objective=objective, unlimited_s=least_s, considered=considered
        )
        within = msgspec.structs.replace(content, search=search, memory_bound=True)
        return limit_is_negligible(within, NEGLIGIBLE)

    less, more = 1 + 0.5 * NEGLIGIBLE, 1 + 2 * NEGLIGIBLE
    assert says(less, 1.0) and not says(more, 1.0)
    assert says(less, 1.0, hidden_s=0.1)  # an answer of a greater sum, more of which is hidden
    assert not says(1.0, None)  # not known, as where nothing fits without a limit on some mesh


@pytest.mark.slow
def test_nothing_is_searched_for_that_is_not_faster_than_what_is_there():
    fn, args = mlp.build(abstract=True, **SHAPE)
    problem = problem_of(fn, args, cluster())
    best = alpa(problem)
    within = problem_with(problem, cutoff_s=best.step_time * 1.001)
    assert alpa(within).content.choices == best.content.choices
    assert isinstance(alpa(problem_with(problem, cutoff_s=best.step_time * 0.999)), Bounded)
