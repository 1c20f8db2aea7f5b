"""Regions of the whole decision: which there are, and what is known of each before anything is planned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.api.steps import TracedStep
from autopar.ir.analysis import gradient_bytes
from autopar.plan import StepForm
from autopar.search.alpa import alpa
from autopar.search.decision import Decision
from autopar.search.loop import Known
from autopar.search.policy import SearchPolicy
from autopar.search.registry import strategy_named
from autopar.search.stage_regions import StageRegions
from autopar.search.trail import ranges_of
from examples import mlp
from tests.search.problems import f32, problem_of, toy, with_policy


def step(w: Any, x: Any) -> Any:
    return w - jnp.tanh(x @ w).sum()


ARGS = (f32(4, 4), f32(8, 4))


def forms(devices: int = 4, nodes: int = 1, strategy: Any = alpa, tries: bool = True, **options: Any) -> list[str]:
    problem = problem_of(step, ARGS, toy(devices, nodes=nodes), **{"num_stages": None, "schedule": "auto", **options})
    return [r.region.form for r in Decision(problem, None, None, strategy).regions(tries_pipelines=tries)]


@pytest.mark.parametrize(
    ("nodes", "devices", "options", "expected"),
    [
        (1, 4, {}, ["one stage", "pipeline"]),
        (2, 2, {}, ["one stage", "pipeline"]),
        (1, 4, {"schedule": "1f1b"}, ["pipeline", "one stage"]),
        (2, 2, {"schedule": "none"}, ["one stage", "pipeline"]),
        (1, 1, {}, ["one stage"]),
        (2, 2, {"num_stages": 1}, ["one stage"]),
        (1, 4, {"num_stages": 2}, ["pipeline"]),
        (1, 4, {"mesh_shape": (2, 2)}, ["one stage"]),
        (2, 4, {"mesh_shape": (2, 2)}, ["one stage"]),
        (2, 4, {"mesh_shape": (2,)}, ["one stage", "pipeline"]),
        (1, 4, {"mesh_shape": (2, 2), "schedule": "1f1b"}, ["pipeline", "one stage"]),
        (1, 4, {"mesh_shape": (2, 2), "num_stages": 2}, ["pipeline"]),
    ],
)
def test_what_was_asked_for_leaves_regions_out(nodes: int, devices: int, options: Any, expected: list[str]) -> None:
    assert forms(devices, nodes, **options) == expected


def test_what_a_strategy_does_itself_is_not_done_next_to_it() -> None:
    def cuts(problem: Any) -> Any:
        raise AssertionError

    cuts.cuts_stages = True  # type: ignore[attr-defined]
    assert forms(2, 2, cuts) == ["pipeline"]
    assert forms(1, 1, cuts) == ["one stage"]
    assert forms(2, 2, tries=False) == ["one stage"]
    assert forms(2, 2, strategy_named("zero1")) == ["one stage"]


def test_even_stages_come_next_on_many_nodes_and_without_a_row_of_their_own() -> None:
    fn, args = mlp.build(abstract=True)
    free = {"num_stages": None, "num_microbatches": None}
    few, many = (problem_of(fn, args, toy(2 * n, nodes=n), **free) for n in (4, 128))
    assert [r.is_silent for r in Decision(few, None, None, alpa).regions(tries_pipelines=True)] == [False, False]
    effort = many.policy.effort
    one, even, *others = Decision(many, None, None, alpa).regions(tries_pipelines=True)
    assert even.is_silent and not any(r.is_silent for r in (one, *others))
    assert one.rank(Known(), effort) == even.rank(Known(), effort) == -math.inf, "before all that a relaxation ranks"


def test_stages_that_never_overlap_are_a_last_resort() -> None:
    fn, args = mlp.build(abstract=True)
    free = {"num_stages": None, "num_microbatches": None}
    cluster = autopar.Cluster.local()
    (_, cpu) = Decision(problem_of(fn, args, cluster, **free), None, None, alpa).regions(tries_pipelines=True)
    (_, other) = Decision(problem_of(fn, args, toy(8), **free), None, None, alpa).regions(tries_pipelines=True)
    assert cpu.only_without is not None and "do not overlap" in cpu.only_without.by
    assert other.only_without is None


def test_a_region_of_a_number_of_stages_says_no_less_than_all_pipelines() -> None:
    fn, args = mlp.build(abstract=True, layers=8, hidden=256, batch=64)
    problem = problem_of(fn, args, toy(8), num_stages=None, num_microbatches=None)
    decision = Decision(problem, None, None, alpa)
    every = decision.several.pipelines()
    numbers = list(decision.several._by_work())
    assert [r.region.stages for r in numbers if not r.region.how] == [ranges_of([s]) for s in (2, 3, 4, 8)]
    two = [r.region.stages for r in numbers if r.region.how == "two stages on each worker"]
    assert two == [ranges_of([s]) for s in (4, 8)], "3 does not divide 8, and there are 8 layers"
    assert all(r.least_s >= every.least_s > 0 for r in numbers)


def test_one_stage_by_the_bound_of_what_is_computed_has_the_trust_of_that_bound() -> None:
    problem = problem_of(step, ARGS, toy(4), num_stages=None, schedule="1f1b")
    pipelines, one = Decision(problem, None, None, alpa).regions(tries_pipelines=True)
    assert one.relaxation == pipelines.relaxation is not None and one.relaxation.spread is None


def test_no_pipeline_is_planned_where_all_devices_cannot_hold_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage says how much memory would do. State that hosts may hold is no proof."""
    tried: list[str] = []
    pipeline = StageRegions.pipelines
    monkeypatch.setattr(
        StageRegions, "pipelines", lambda self, *args: tried.append("pipelines") or pipeline(self, *args)
    )
    (fn, args), devices = mlp.build(abstract=True), 4
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[0]))
    gradients = gradient_bytes(problem_of(fn, args, toy(devices)).graph)

    def refused(limit: int, **options: Any) -> int:
        with pytest.raises(autopar.InfeasiblePlanError) as error:
            given = {"cluster": toy(devices, nodes=2), "memory_limit": limit, "donate_argnums": 0, **options}
            autopar.parallelize(fn, **given).plan(*args)
        assert error.value.least_bytes is not None
        return error.value.least_bytes

    assert refused(state // devices // 2) >= state // devices and not tried
    refused((state + gradients // 2) // devices)
    assert not tried
    refused((state + gradients) // devices + 100)
    assert tried


@pytest.mark.parametrize("is_long", [False, True])
def test_where_the_state_has_no_room_few_forms_say_how_much_would_do(is_long: bool) -> None:
    """All of them where that is little work; else the one that is likely to hold least."""
    fn, args = mlp.build(abstract=True)
    policy = SearchPolicy()
    policy = replace(policy, effort=replace(policy.effort, large_work=1 if is_long else policy.effort.large_work))
    parallel = autopar.parallelize(fn, cluster=toy(4), num_stages=1, donate_argnums=0, memory_limit=1000)
    tried: list[StepForm] = []
    in_form = TracedStep.in_form

    def noted(self: TracedStep, form: StepForm) -> Any:
        tried.append(form)
        return in_form(self, form)

    with mock.patch.object(TracedStep, "in_form", noted), pytest.raises(autopar.InfeasiblePlanError) as error:
        with_policy(parallel, policy).plan(*args)
    counts = {form.microbatches for form in tried}
    assert (len(counts) == 1) == is_long and {form.remat for form in tried} >= {"full"}
    assert "the least that would do is" in str(error.value) and error.value.least_bytes is not None
    least = error.value.least_bytes
    enough = autopar.parallelize(fn, cluster=toy(4), num_stages=1, donate_argnums=0, memory_limit=least)
    assert enough.plan(*args).peak_memory <= least
