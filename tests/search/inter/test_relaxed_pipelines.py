"""Relaxed pipelines say what is planned exactly: they end where they are slower, and leave out what cannot gain."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import msgspec
import pytest

import autopar
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.search import Job, Problem, mesh_search
from autopar.search.intra import build
from autopar.search.one_stage import OneStagePlanner
from autopar.search.outcome import NoRoomError
from autopar.search.pipeline import stage, whole_steps
from autopar.search.pipeline.candidates import Candidate, CuttableStep
from autopar.search.pipeline.first_pipeline import even_candidates, has_equal_stages, other_even_candidates
from autopar.search.pipeline.plan_candidate import least_relaxation_s, mesh_shape, plan_candidate
from autopar.search.pipeline.relaxed_pipelines import limit_cost, may_gain, relaxed_pipeline
from autopar.search.pipeline.search import _on_likely_meshes, _with_two_stages_per_worker
from autopar.search.policy import SearchPolicy, SizePolicy
from autopar.search.several_stages import SeveralStages
from autopar.search.store import Store
from autopar.solver.memory import evenly_split_bytes
from autopar.stages import cluster
from examples import gpt, mlp
from tests.search.inter.test_busy import content_of
from tests.search.problems import problem_with, toy, with_policy

#: Every step is as a large one.
LARGE = SearchPolicy(sizes=SizePolicy(tiny_operators=0, few_operators=0, small_operators=0))


def planned(policy=LARGE, memory=10**9, nodes=4, devices=None, batch=64, **options):
    fn, args = mlp.build(abstract=True, layers=8, hidden=64, batch=batch)
    cluster = toy(devices or nodes, nodes=nodes, bandwidth=1e7, memory=memory)
    return with_policy(autopar.parallelize(fn, cluster=cluster, donate_argnums=0, **options), policy).plan(*args)


@pytest.fixture
def layered(monkeypatch):
    """The problem, its source and the strategy of a search of pipelines."""
    searches = []
    in_stages = SeveralStages._planned

    def note(self, search, one_loop=False):
        def noted(whole):
            searches.append(whole)
            raise KeyboardInterrupt

        return in_stages(self, noted, one_loop)

    def nothing(self, *some):
        raise InfeasiblePlanError("one stage is not planned")

    monkeypatch.setattr(SeveralStages, "_planned", note)
    monkeypatch.setattr(OneStagePlanner, "best", nothing)
    with contextlib.suppress(KeyboardInterrupt):
        planned(num_microbatches=16, schedule="1f1b", memory=400_000)
    free = replace(searches[0].subproblem, tried_stages=None, cutoff_s=math.inf)
    return replace(searches[0], anytime=None, subproblem=free)


def test_a_relaxed_pipeline_ends_once_its_stages_take_as_long(layered):
    first = next(even_candidates(layered, layered.source))
    assert has_equal_stages(layered.source, first)
    stages = []

    def intra(problem):
        stages.append(problem)
        return autopar.search.alpa(problem)

    whole = relaxed_pipeline(CuttableStep(layered, layered.source, intra), first)
    assert whole is not None
    needed = len(stages)
    stages.clear()
    another = replace(layered, store=Store())
    assert relaxed_pipeline(CuttableStep(another, layered.source, intra), first, cutoff_s=0.5 * whole.step_time) is None
    assert 1 <= len(stages) < needed
    in_time = relaxed_pipeline(CuttableStep(another, layered.source, intra), first, cutoff_s=1.5 * whole.step_time)
    assert in_time is not None and in_time.step_time == pytest.approx(whole.step_time)


@pytest.mark.parametrize("relaxes", (False, True))
def test_a_stage_without_room_is_not_stated_again_in_fewer_microbatches(layered, monkeypatch, relaxes):
    first = next(even_candidates(layered, layered.source))
    assert first.count == 16
    stated = []
    monkeypatch.setattr(mesh_search, "build", lambda *a, **k: (stated.append(a), build(*a, **k))[1])
    step = CuttableStep(problem_with(layered, memory_limit_bytes=20_000), layered.source, autopar.search.alpa)
    plan = relaxed_pipeline if relaxes else plan_candidate
    with pytest.raises(NoRoomError):
        plan(step, first)
    assert stated
    for fewer in (16, 8, 2):
        stated.clear()
        with pytest.raises(NoRoomError):
            plan(step, replace(first, count=fewer))
        assert not stated
    for other in (1, 32):
        stated.clear()
        with pytest.raises(NoRoomError):
            plan(step, replace(first, count=other))
        assert stated
    roomy = replace(step, problem=problem_with(step.problem, memory_limit_bytes=10**9))
    assert isinstance(plan(roomy, first), autopar.Plan)


def test_stages_hold_no_less_in_fewer_microbatches(layered, monkeypatch):
    """Equal pieces of all values, by the statement of each stage with what is in flight."""
    stated = []
    monkeypatch.setattr(mesh_search, "build", lambda *a, **k: (stated.append((a[0], build(*a, **k))), stated[-1][1])[1])
    first = next(even_candidates(layered, layered.source))
    least = {}
    for count in (2, 4, 8, 16):
        stated.clear()
        step = CuttableStep(replace(layered, store=Store()), layered.source, autopar.search.alpa)
        assert isinstance(plan_candidate(step, replace(first, count=count)), autopar.Plan)
        least[count] = {
            (problem.graph.name, problem.subproblem.extra_in_flight > 0): evenly_split_bytes(made.problem.usages, 1)
            for problem, made in stated
        }
    for fewer, more in itertools.pairwise(least):
        assert least[fewer].keys() & least[more].keys()
        for key in least[fewer].keys() & least[more].keys():
            assert least[fewer][key] >= least[more][key], (key, least)


def test_stages_are_planned_for_the_schedule_in_which_the_relaxed_one_is_the_fastest(monkeypatch):
    tried = []

    def noted(step, candidate, *args, **kwargs):
        plan = plan_candidate(step, candidate, *args, **kwargs)
        tried.append((candidate, plan))
        return plan

    monkeypatch.setattr("autopar.search.pipeline.relaxed_pipelines.plan_candidate", noted)
    monkeypatch.setattr("autopar.search.pipeline.trials.plan_candidate", noted)
    plan = planned(memory=400_000)
    relaxed = min((p for c, p in tried if c.shares_plans and isinstance(p, autopar.Plan)), key=lambda p: p.step_time)
    exact = next(c for c, _ in tried if not c.shares_plans)
    assert relaxed.schedule != "1f1b"
    assert exact.schedule is not None and exact.schedule.name == relaxed.schedule
    assert plan.step_time <= relaxed.step_time


def test_near_a_first_pipeline_are_other_numbers_of_stages_and_other_meshes(layered):
    first = next(even_candidates(layered, layered.source))
    others = list(other_even_candidates(layered, layered.source, first))
    assert {len(c.members) for c in others} == {2, 8} - {len(first.members)} or len(first.members) not in {
        len(c.members) for c in others if c.meshes == first.meshes
    }
    assert all(c.schedule is None and c != first for c in others)


def test_the_slowest_stage_waits_for_a_share_of_a_microbatch_of_each_other():
    contents = {1: content_of(4.0, 8.0, 1.0), 3: content_of(8.0, 16.0, 2.0)}
    # Stage 2 is as stage 1; stage 0 is not known.
    assert least_relaxation_s(contents, (0, 1, 1, 3), 4, 0.5) == pytest.approx(26.0 + 0.5 / 4 * 24.0)


def at(count, stages=4):
    members = tuple((f"op{s}",) for s in range(stages))
    return Candidate(count, members, tuple((s, 1) for s in range(stages)), 0.0)


def with_step(plan, step_s, **content):
    return replace(plan, content=msgspec.structs.replace(plan.content, step_time=step_s, **content))


def test_more_microbatches_gain_the_bubble_and_what_the_limit_costs():
    plan = planned(num_stages=4, num_microbatches=16, schedule="1f1b")
    assert limit_cost(plan) == 0.0
    assert may_gain(plan, at(8), 16, {}, 0.005)  # 3 / 8 of a microbatch in all
    assert not may_gain(plan, at(512), 1024, {}, 0.005)
    bound = tuple(msgspec.structs.replace(c, memory_bound=True) for c in plan.content.parts)
    assert may_gain(with_step(plan, plan.step_time, parts=bound), at(512), 1024, {}, 0.005)


def test_fewer_microbatches_are_relaxed_unless_the_bubble_takes_what_they_gain():
    plan = planned(num_stages=4, num_microbatches=16, schedule="1f1b")
    here, twice = with_step(plan, 10.0), with_step(plan, 10.1)
    assert may_gain(here, at(64), 32, {}, 0.005)
    assert not may_gain(here, at(64), 32, {64: here, 128: twice}, 0.005)
    assert may_gain(here, at(64), 32, {64: here, 128: with_step(plan, 14.0)}, 0.005)


def test_twice_the_microbatches_are_left_out_where_starts_and_messages_take_what_the_bubble_gains():
    plan = planned(num_stages=4, num_microbatches=16, schedule="1f1b")
    half, here = with_step(plan, 10.0), with_step(plan, 9.9)
    assert may_gain(here, at(16), 32, {8: with_step(plan, 11.5), 16: here}, 0.005)
    assert may_gain(here, at(16), 32, {}, 0.005)
    assert not may_gain(here, at(16), 32, {8: half, 16: here}, 0.005)


def test_fewer_microbatches_are_left_out_where_these_are_as_many_as_memory_holds():
    plan = planned(num_stages=4, num_microbatches=16, schedule="1f1b")
    bound = tuple(msgspec.structs.replace(c, memory_bound=True) for c in plan.content.parts)
    assert may_gain(plan, at(16), 8, {}, 0.005)
    assert not may_gain(with_step(plan, plan.step_time, parts=bound), at(16), 8, {}, 0.005)


def test_a_limit_that_costs_nothing_is_no_gain_of_more_microbatches():
    plan = planned(num_stages=4, num_microbatches=16, schedule="1f1b")

    def limited(unlimited_s):
        parts = plan.content.parts
        search = msgspec.structs.replace(parts[0].search, objective=2.0, unlimited_s=unlimited_s)
        first = msgspec.structs.replace(parts[0], memory_bound=True, search=search)
        return with_step(plan, plan.step_time, parts=(first, *parts[1:]))

    assert [limit_cost(limited(s)) for s in (2.01, 2.0, 1.5, None)] == [0.0, 0.0, 0.25, 1.0]


def test_recomputation_takes_no_less_than_is_said_before_it_is_planned(monkeypatch):
    said = []
    recomputed_s = stage.recomputed_s

    def note(placed, level):
        seconds = recomputed_s(placed, level)
        said.append((placed.stage, level, seconds))
        return seconds

    monkeypatch.setattr(stage, "recomputed_s", note)
    asked = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", "nodes": 2, "devices": 4, "batch": 1024}
    ample = planned(remat="none", mesh_shape=(2,), **asked)
    for share in (0.95, 0.85, 0.75, 0.65):
        with contextlib.suppress(InfeasiblePlanError):
            planned(memory=int(share * ample.peak_memory), mesh_shape=(2,), **asked)
    assert {level for _, level, _ in said} == {"full", "selective"} and any(s > 0 for _, _, s in said)
    least = {level: planned(remat=level, mesh_shape=(2,), **asked).content.parts for level in ("full", "selective")}
    for number, level, seconds in said:
        more_s = least[level][number].search.objective - ample.content.parts[number].search.objective
        assert seconds <= more_s * (1 + 1e-9) + 1e-12


@pytest.mark.slow
def test_numbers_of_microbatches_in_which_nothing_fits_are_left_out(monkeypatch):
    asked = []
    best = OneStagePlanner.best

    def note(self, *more):
        asked.append((self.problem, self.step))
        return best(self, *more)

    monkeypatch.setattr(OneStagePlanner, "best", note)
    shape = {"batch": 4096, "num_stages": 1}
    planned(**shape)
    problem, step = asked[0]
    possible = [1, 2, 4, 8, 16, 32, 64]
    assert whole_steps.counts_that_may_fit(problem, step, possible) == possible
    memory = int(0.6 * planned(num_microbatches=1, remat="none", **shape).peak_memory)
    short = replace(problem, job=replace(problem.job, memory_limit_bytes=memory))
    counts = whole_steps.counts_that_may_fit(short, step, possible)
    assert counts == possible[-len(counts) :] and 1 < len(counts) < len(possible)
    for count in possible[: -len(counts)]:
        with pytest.raises(InfeasiblePlanError):
            planned(memory=memory, num_microbatches=count, remat="none", **shape)


def _with_two_a_worker(workers, count):
    """Candidates of a GPT of six blocks, and what cuts its step."""
    fn, args = gpt.build("tiny", layers=6, batch=12, abstract=True)
    signature, _ = flatten_call(fn, args, {}, SignatureOptions())
    source = TracedStages(step_of(trace(fn, signature)))
    nodes = toy(4 * workers, nodes=workers)
    whole = Problem(source.step.graph, nodes, CostModel(nodes), job=Job(num_stages=None), source=source)
    region = replace(whole.subproblem, tried_stages=(workers,), stages_per_worker=2, first_count=count)
    whole = replace(whole, subproblem=region, policy=LARGE)
    return whole, source, list(_with_two_stages_per_worker(whole, source))


def test_two_stages_on_each_worker_are_whole_blocks():
    """Stages of parts of blocks are of as many kinds as there are stages, and as uneven."""
    whole, source, some = _with_two_a_worker(3, 6)
    blocks = cluster(whole.graph, source.microbatches(6), 6, fewest=6).members
    assert [candidate.layers for candidate in some] == [blocks] * len(some) != []


def test_a_candidate_without_meshes_is_relaxed_on_those_most_like_the_machine():
    whole, _, (candidate, *_) = _with_two_a_worker(3, 6)
    assert [c.meshes for c in _on_likely_meshes(whole, candidate)] == [((4,),) * 6, ((2, 2),) * 6]
    named = replace(candidate, meshes=((2, 2),) * 6)
    assert _on_likely_meshes(whole, named) == [named]
    asked = replace(whole, job=replace(whole.job, mesh_shape=(2, 2)))
    assert _on_likely_meshes(asked, candidate) == [candidate]


def test_relaxations_try_first_the_mesh_on_which_the_stage_that_most_are_like_fits():
    """Where it is not the one that was named, others are not tried on that one again."""
    whole, source, (candidate, *_) = _with_two_a_worker(3, 6)
    shapes = []

    def intra(problem):
        shapes.append(problem.job.mesh_shape)
        if problem.job.mesh_shape == (4,):
            raise InfeasiblePlanError("the mesh that was named")
        return autopar.search.alpa(problem)

    named = replace(candidate, meshes=((4,),) * 6)
    plan = relaxed_pipeline(CuttableStep(whole, source, intra), named)
    assert plan is not None
    assert {mesh_shape(part) for part in plan.content.parts} == {(2, 2)}
    later = itertools.dropwhile(lambda shape: shape is not None, shapes)
    assert shapes[0] == (4,)
    assert (4,) not in later
