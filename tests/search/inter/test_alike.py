"""Of layers and isomorphic stages one is looked at, and the others come out as if each had been."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

import autopar
from autopar.cost import CostModel
from autopar.errors import InfeasiblePlanError
from autopar.ir.text import graph_digest
from autopar.plan import StepForm
from autopar.search import Job, Problem, alpa
from autopar.search.intra import build
from autopar.search.intra.memory import IN_FLIGHT
from autopar.search.mesh_search import MeshSearch
from autopar.search.outcome import Bounded
from autopar.search.pipeline.isomorphic_stages import StagePlanner, renamed_content
from autopar.search.problem_data import key_without_room
from autopar.search.store import Store
from autopar.stages.isomorphic import KindTable
from autopar.stages.layers import find_repeats
from examples import mlp
from tests.end_to_end.clusters import MIDDLE
from tests.search.inter.blocks import cut_into_blocks

COUNT = 4


@pytest.fixture(scope="module")
def cut():
    """A GPT of six blocks and a head, a stage for each."""
    return cut_into_blocks(COUNT)


@pytest.mark.slow
def test_blocks_are_the_layers(cut):
    _, layers = cut
    assert len(layers.members) == 7
    assert layers.isomorphic == (0, 1, 1, 1, 1, 1, 6), "the first has the embedding, the last the loss"
    assert len(set(layers.cut_bytes[:-1])) == 1, "every cut lets the residual stream through"


@pytest.mark.slow
def test_stages_alike_are_one_under_other_names(cut):
    source, layers = cut
    sliced = source.slice(COUNT, layers.members)
    assert len(set(sliced.isomorphic)) < len(layers.members)
    for level in ("none", "full"):
        for stage in range(len(layers.members)):
            form = StepForm(COUNT, level)
            traced = source.stage_graph(layers.members, stage, form).graph
            assert source.in_form(layers.members, stage, form).graph == traced


def test_a_digest_names_one_graph(cut):
    """Graphs of stages have a digest of how they were made, others one of their text."""
    source, layers = cut
    graphs, again = (list(source.slice(COUNT, layers.members).graphs) for _ in range(2))
    assert len(set(map(graph_digest, graphs))) == len(graphs)
    assert all(a == b and graph_digest(a) == graph_digest(b) for a, b in zip(graphs, again, strict=True))
    other = replace(graphs[1], name="another")
    assert graph_digest(other) == graph_digest(replace(other)) != graph_digest(graphs[1])
    assert graph_digest(pickle.loads(pickle.dumps(graphs[1]))) == graph_digest(graphs[1])


@pytest.mark.slow
def test_a_plan_is_handed_on_as_it_would_have_been_made(cut):
    source, layers = cut
    sliced = source.slice(COUNT, layers.members)
    first, second = next((a, b) for b, a in enumerate(sliced.isomorphic) if a != b)
    part = MIDDLE.part(0, 2)
    donated = frozenset(i.name for s in (first, second) for i in sliced.graphs[s].inputs if i.role == "parameter")

    def content(stage):
        problem = Problem(sliced.graphs[stage], part, CostModel(part), job=Job(num_microbatches=COUNT))
        own = donated & {i.name for i in problem.graph.inputs}
        return alpa(replace(problem, job=replace(problem.job, donated=own))).content

    assert renamed_content(content(first), sliced.graphs[first], sliced.graphs[second]) == content(second)


def test_the_pass_in_which_a_value_arrives_is_part_of_the_kind(cut):
    source, layers = cut
    parts = source.slice(COUNT, layers.members).parts[1]
    other = replace(parts, received=tuple(replace(r, backward=not r.backward) for r in parts.received))
    table = KindTable(source.step.graph, source.microbatches(COUNT))
    assert parts.received and table.kind(parts).key == table.kind(replace(parts)).key != table.kind(other).key


def test_of_stages_alike_one_is_found_to_be_slower(cut):
    """An isomorphic stage is not looked at again, unless more memory or a later cutoff might make it fast enough."""
    source, layers = cut
    graph = source.slice(COUNT, layers.members).graphs[1]
    part, asked = MIDDLE.part(0, 2), []

    def intra(problem):
        asked.append(problem)
        return Bounded("slower")

    shared = StagePlanner(intra)
    stage = Problem(graph, part, CostModel(part), job=Job(num_microbatches=COUNT, memory_limit_bytes=1000))
    same, less = (1000, 1, 2.0, 1), (900, 2, 1.5, 1)
    more_memory, fewer_in_flight, later = (1100, 1, 2.0, 2), (900, 0, 2.0, 3), (900, 2, 2.5, 4)
    for limit_bytes, extra, cutoff_s, relaxed in (same, less, more_memory, fewer_in_flight, later, (1100, 1, 1.9, 4)):
        job = replace(stage.job, memory_limit_bytes=limit_bytes)
        subproblem = replace(stage.subproblem, extra_in_flight=extra, cutoff_s=cutoff_s)
        asked_of = replace(stage, job=job, subproblem=subproblem)
        assert shared.plan(asked_of, "stage") == Bounded("slower")
        assert len(asked) == relaxed


def test_every_stage_priced_and_planned_is_told():
    told = []
    fn, args = mlp.build(abstract=True)
    plan = autopar.parallelize(fn, cluster=MIDDLE, num_stages=2, num_microbatches=2, progress=told.append).plan(*args)
    assert plan.num_stages == 2
    assert any(line.startswith("pricing") for line in told)
    assert sum(line.startswith("planning stage") for line in told) >= 2


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_found(seed):
    rng = np.random.default_rng(seed)
    period, count = int(rng.integers(1, 12)), int(rng.integers(3, 20))
    block = rng.integers(0, 5, period).tolist()
    block[0] = 99
    head = [f"head {i}" for i in range(rng.integers(0, 6))]
    tail = [f"tail {i}" for i in range(rng.integers(0, 6))]
    sequence = [*head, *(block * count), *tail]
    found = find_repeats(sequence, np.array([100.0 if x == 99 else 1.0 for x in sequence]))
    assert found is not None
    assert (found.start, found.period, found.count, found.extra) == (len(head), period, count, 0)
    cost = np.ones(len(sequence))
    wanted = int(rng.integers(0, period))
    cost[[len(head) + wanted - 1 + period * k for k in range(count) if len(head) + wanted + period * k]] = 0.5
    phased = found.phased(cost)
    assert phased.start == len(head) + wanted
    assert phased.count == count - (wanted > 0)


def test_what_does_not_repeat_has_no_blocks():
    assert find_repeats(list("abcdefgh"), np.ones(8)) is None
    assert find_repeats(list("abababcdefghijklmnop"), np.ones(20)) is None, "too little of the whole"


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 5, 2), (3, 1), (0, 2, 0)])
def test_what_is_built_for_some_in_flight_serves_more_and_less(cut, counts):
    source, layers = cut
    sliced = source.slice(COUNT, layers.members)
    part = MIDDLE.part(0, 2)
    whole = Problem(sliced.graphs[1], part, CostModel(part), job=Job(num_microbatches=COUNT))
    peaks = {}
    for extra in counts:
        subproblem = replace(
            whole.subproblem, extra_in_flight=extra, separate_programs=True, arriving=sliced.arriving(1)
        )
        problem = replace(whole, subproblem=subproblem)
        more = replace(problem, subproblem=replace(subproblem, extra_in_flight=9))
        assert (key_without_room(problem, "statement") == key_without_room(more, "statement")) == bool(extra)
        limit = replace(problem.job, memory_limit_bytes=int(0.9 * alpa(replace(problem, store=Store())).peak_memory))
        for job in (problem.job, limit):
            asked = replace(problem, job=job)
            alone, shared = (_content_of(replace(asked, store=store)) for store in (Store(), whole.store))
            assert shared == alone
        peaks[extra] = alpa(problem).content.peak_memory
        for mesh in part.logical_meshes(None):
            known = MeshSearch(problem).program(mesh)
            built = build(problem, mesh, split_phases=False)
            assert [u.kind for u in known.usages] == [u.kind for u in built.usages]
            assert all((u.bytes == v.bytes).all() for u, v in zip(known.usages, built.usages, strict=True))
            held = zip(known.problem.usages, built.problem.usages, strict=True)
            assert all((u.bytes == v.bytes).all() for u, v in held)
            assert any(u.kind == IN_FLIGHT for u in built.usages) == bool(extra)


def _content_of(problem):
    try:
        return alpa(problem).content
    except InfeasiblePlanError as error:
        return error.fact
