"""Several stages on a worker: each is planned with room for the others, and one of those with the same problem."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import pytest

import autopar
from autopar.cost import CostModel
from autopar.schedule import get
from autopar.search import Job, Problem, alpa
from autopar.search.intra import build
from autopar.search.intra.extract import memory_of
from autopar.search.intra.memory import OTHER_STAGES
from autopar.search.pipeline.plan_candidate import plan_candidate
from autopar.search.pipeline.stage_problem import ScheduledStages, in_flight
from autopar.search.policy import SearchPolicy, SizePolicy
from autopar.search.store import Store
from autopar.search.worker_pool import metered
from autopar.solver import peak_bytes, solve
from autopar.solver.meter import Meter
from examples import mlp
from tests.end_to_end.clusters import MIDDLE
from tests.search.inter.blocks import cut_into_blocks
from tests.search.problems import problem_of, toy, with_policy

COUNT = 4


@pytest.fixture(scope="module")
def cut():
    """A GPT of six blocks and a head, a stage for each."""
    source, layers = cut_into_blocks(COUNT)
    return source.slice(COUNT, layers.members)


def stage_of(sliced, others: int) -> Problem:
    part = MIDDLE.part(0, 2)
    whole = Problem(sliced.graphs[1], part, CostModel(part), job=Job(num_microbatches=COUNT))
    known = replace(whole.subproblem, extra_in_flight=2, separate_programs=True, arriving=sliced.arriving(1))
    return replace(whole, subproblem=replace(known, other_stages=others))


def test_the_state_of_other_stages_counts_once_for_each(cut):
    """A choice that n stages share a worker with takes n times what lasts and once what passes."""
    alone, shared = stage_of(cut, 0), stage_of(cut, 3)
    for mesh in alone.cluster.logical_meshes(None):
        problem, with_others = build(alone, mesh), build(shared, mesh)
        choice = solve(replace(problem.problem, limit_bytes=None)).choice
        lasting = sum(u.bytes[choice[u.node]] for u in with_others.usages if u.kind == OTHER_STAGES)
        state = sum(
            v.layouts[choice[v.node]].local_bytes(v.type, mesh.sizes)
            for i in alone.graph.inputs
            if i.role in ("parameter", "optimizer") and (v := problem.values[i.name]).node is not None
        )
        assert lasting > 3 * state > 0, "what microbatches add up lasts too"
        assert peak_bytes(with_others.problem, choice) == pytest.approx(peak_bytes(problem.problem, choice) + lasting)
        here, there = (memory_of(p, choice) for p in (problem, with_others))
        assert here == there, "a plan says what its stage takes, and nothing of the others"


def test_stages_of_a_worker_fit_together(monkeypatch):
    """Under limits from loose to tight each stage is planned with room for the others, and all keep the memory."""
    module, together = sys.modules[plan_candidate.__module__], list[bool]()
    within = module._within_limits

    def watched(pipeline, *more):
        contents = within(pipeline, *more)
        together.append(pipeline.together)
        return contents

    monkeypatch.setattr(module, "_within_limits", watched)
    fn, args = mlp.build(abstract=True, layers=8, hidden=256, batch=256)
    large = SearchPolicy(sizes=replace(SizePolicy(), small_operators=0))

    def plan(limit=None):
        options = {"num_stages": 8, "num_microbatches": 8, "schedule": "interleaved", "donate_argnums": 0}
        cluster = autopar.Cluster.load("dgx-a100")
        return with_policy(autopar.parallelize(fn, cluster=cluster, memory_limit=limit, **options), large).plan(*args)

    free = plan()
    assert not together
    for share in (0.97, 0.9, 0.8):
        limit = int(share * free.peak_memory)
        assert plan(limit).peak_memory <= limit
    assert together and all(together)


def test_one_plan_for_stages_with_the_same_problem(monkeypatch):
    """Plans are the same, to the byte, whether isomorphic stages are planned one by one or once."""
    fn, args = mlp.build(abstract=True, layers=12)
    parallel = autopar.parallelize(
        fn, cluster=toy(4), num_stages=6, num_microbatches=4, schedule=get("interleaved", chunks=3)
    )
    found = []
    known = Store.known
    monkeypatch.setattr(Store, "known", lambda *a, **k: found.append(known(*a, **k)) or found[-1])
    plan = parallel.plan(*args)
    assert any(content is not None for content in found)
    monkeypatch.setattr(Store, "known", lambda *_, **__: None)
    assert parallel.plan(*args).content == plan.content


def test_in_flight_of_a_worker_is_of_all_its_stages():
    table = get("interleaved", chunks=2).table(8, 8)
    pipeline = ScheduledStages(None, None, None, (), (), table, together=True)  # type: ignore[arg-type]
    for worker in range(table.num_workers):
        stages = table.stages_of_worker(worker)
        flying = most = 0
        for task in table.rows[worker]:
            flying += 1 if task.kind == "forward" else -1
            most = max(most, flying)
        assert all(pipeline.in_flight(s) == most for s in stages)
        assert most <= sum(in_flight(table, s) for s in stages)
        assert {pipeline.other_stages(s) for s in stages} == {len(stages) - 1}
    alone = replace(pipeline, together=False)
    assert all(alone.in_flight(s) == in_flight(table, s) and not alone.other_stages(s) for s in range(8))


def test_another_process_keeps_the_answers_of_a_search():
    """Problems that arrive there are of one store, and come out as they would anywhere."""
    fn, args = mlp.build(abstract=True)
    problem, store, meter = problem_of(fn, args, toy(4)), Store(), Meter()
    first, again = (metered(pickle.loads(pickle.dumps(problem)), meter, store) for _ in range(2))
    assert first == problem and first.store is again.store is store and first.meter is meter
    assert metered("text", meter, store) == "text"
    limit = replace(problem.job, memory_limit_bytes=int(0.95 * alpa(problem).peak_memory))
    for asked in (problem, replace(problem, job=limit), problem):
        there = metered(pickle.loads(pickle.dumps(asked)), meter, store)
        assert alpa(there).to_json() == alpa(asked).to_json()
