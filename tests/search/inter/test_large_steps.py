"""What large steps share and leave out: integer programs of several limits, slicings in other numbers of microbatches,
and pairs that cannot be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.api.parallelize import parallelize_with
from autopar.errors import InfeasiblePlanError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.search import alpa
from autopar.search.policy import SearchPolicy, SizePolicy
from autopar.search.problem_data import key_without_room
from autopar.search.store import Store
from examples import gpt, mlp
from tests.search.problems import problem_of, toy, with_policy

#: Every step is as a large one.
LARGE = SearchPolicy(sizes=SizePolicy(tiny_operators=0, few_operators=0, small_operators=0))


def test_half_and_twice_the_microbatches_are_no_faster():
    fn, args = mlp.build(abstract=True, layers=4, hidden=64, batch=64)
    whole = autopar.parallelize(fn, cluster=toy(2, nodes=2, bandwidth=1e7), schedule="1f1b")
    free = with_policy(whole, LARGE).plan(*args)
    assert free.num_stages == 2
    for count in (free.num_microbatches // 2, 2 * free.num_microbatches):
        if 2 <= count <= 64:
            options = replace(whole.options, num_stages=2, num_microbatches=count)
            asked = with_policy(parallelize_with(fn, options), LARGE).plan(*args)
            assert free.step_time <= 1.001 * asked.step_time


@pytest.mark.slow
def test_what_is_built_for_one_limit_serves_the_next():
    fn, args = mlp.build(abstract=True, layers=2, hidden=16, batch=16)
    whole = problem_of(fn, args, toy(2, bandwidth=1e7))
    free = alpa(whole)
    tighter = replace(whole, job=replace(whole.job, memory_limit_bytes=int(0.8 * free.peak_memory)))
    assert key_without_room(tighter, "statement") == key_without_room(whole, "statement")
    alone = replace(tighter, store=Store())
    try:
        expected = alpa(alone).content
    except InfeasiblePlanError as error:
        with pytest.raises(InfeasiblePlanError, match=str(error).partition(";")[0]):
            alpa(tighter)
    else:
        assert alpa(tighter).content == expected
        assert alpa(whole).content == free.content


def test_another_cluster_has_problems_of_its_own():
    fn, args = mlp.build(abstract=True, layers=1, hidden=8, batch=8)
    graph = trace(fn, flatten_call(fn, args, {}, SignatureOptions())[0]).graph
    problem = replace(problem_of(fn, args, toy(2)), graph=graph)
    first = key_without_room(problem, "statement")
    assert key_without_room(problem, "statement") == first
    assert key_without_room(replace(problem, cluster=toy(4)), "statement") != first


def test_on_whole_nodes_no_pair_is_planned_that_takes_longer_than_one_stage():
    """Links that are as fast inside as between nodes: one stage is the answer, and no stage is planned."""
    fn, args = gpt.build(abstract=True, layers=3, scan=True, batch=12)
    told: list[str] = []
    free = autopar.parallelize(fn, cluster=toy(3, nodes=3, bandwidth=1e13, flops=1e6), progress=told.append)
    plan = with_policy(free, SearchPolicy(sizes=SizePolicy(large_nodes=2))).plan(*args)
    assert plan.num_stages == 1
    assert not any("planning stage" in t for t in told), told
