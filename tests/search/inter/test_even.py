"""Stages that are all to take the same time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.search.pipeline.partition import even_ends
from examples import gpt, mlp


def cluster(devices):
    device = Device("toy", 10**9, 1e12, (("f32", 2e9),))
    return Cluster("toy", (NodeGroup(1, devices, device, LinkSpec(1e9, 1e-7), "intra"),))


def stages(build, pp, chunks=1, **sizes):
    fn, args = build(abstract=True, **sizes)
    search = autopar.search.Manual(pp=pp, chunks=chunks)
    return autopar.parallelize(fn, cluster=cluster(pp), search=search, num_microbatches=4).plan(*args).stages


@pytest.mark.slow
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_the_heaviest_run_is_as_light_as_can_be(weights, data):
    count = data.draw(st.integers(1, len(weights)))

    def runs(ends):
        return [sum(weights[a:b]) for a, b in zip((0, *ends), ends, strict=False)]

    def rank(ends):
        return max(runs(ends)), sum(r * r for r in runs(ends))

    every = [(*cut, len(weights)) for cut in itertools.combinations(range(1, len(weights)), count - 1)]
    found = even_ends(weights, count)
    assert found in every
    assert rank(found) == min(map(rank, every))


def test_blocks_are_dealt_evenly_where_a_small_layer_is_behind_them():
    assert even_ends([1.0] * 80 + [0.35], 16) == (*range(5, 80, 5), 81)


@pytest.mark.slow
def test_stages_that_a_person_asks_for_are_whole_blocks_and_as_many_each():
    found = stages(gpt.build, 4, layers=12, hidden=32, vocab=64, batch=8)
    seconds = [dict(s.work_times)["forward"] for s in found]
    assert max(seconds[:3]) <= 1.1 * min(seconds[:3]), seconds


@pytest.mark.slow
def test_a_person_may_ask_for_more_than_32_stages():
    found = stages(mlp.build, 36, layers=36, hidden=8, batch=8)
    assert len(found) == 36
    assert sum(len(s.devices) for s in found) == 36


@pytest.mark.slow
def test_chunks_are_as_many_blocks_each():
    found = stages(gpt.build, 2, 3, layers=12, hidden=32, vocab=64, batch=8)
    seconds = [dict(s.work_times)["forward"] for s in found[:-1]]
    assert max(seconds) <= 1.1 * min(seconds), seconds


@pytest.mark.slow
def test_scanned_layers_are_taken_apart_for_the_stages_that_a_person_asks_for():
    found = stages(gpt.build, 20, layers=20, hidden=8, heads=2, vocab=16, seq=4, batch=4, scan=True)
    seconds = [dict(s.work_times)["forward"] for s in found[1:-1]]
    assert len(found) == 20
    assert max(seconds) == min(seconds)


@pytest.mark.slow
def test_a_schedule_with_chunks_has_as_many_blocks_in_each():
    fn, args = gpt.build(abstract=True, layers=12, hidden=32, vocab=64, batch=8)
    schedule = autopar.schedule.get("interleaved", chunks=3)
    options = {"num_stages": 6, "num_microbatches": 4, "schedule": schedule}
    found = autopar.parallelize(fn, cluster=cluster(2), **options).plan(*args).stages
    seconds = [dict(s.work_times)["forward"] for s in found[:-1]]
    assert max(seconds) <= 1.1 * min(seconds), seconds
