"""How devices are dealt out to workers, and that microbatches and stages are counted together."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.cost import CostModel
from autopar.search.bound import Freedom, work_bound_s, workers_of
from autopar.search.pipeline.partition import submeshes
from tests.search.problems import graph_of
from tests.search.test_sure_work import train_step


def cluster_of(nodes, per_node):
    """Devices on which every kernel takes a second and all else nothing."""
    device = Device("toy", 10**9, 1e30, (("f32", 1e30),), launch_s=1.0)
    link = LinkSpec(1e30, 0.0)
    return Cluster("toy", (NodeGroup(nodes, per_node, device, link, link if nodes > 1 else "intra"),))


def dealt(cluster, workers):
    """All numbers of devices that one of so many workers has where they are all devices together."""
    sizes = sorted({m.size for m in submeshes(cluster)})
    ways = itertools.combinations_with_replacement(sizes, workers)
    return {n for way in ways if sum(way) == cluster.num_devices for n in way}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (2, 4), (3, 4), (4, 2), (5, 1)])
def test_workers_have_what_submeshes_add_up_to(nodes, per_node):
    cluster = cluster_of(nodes, per_node)
    devices = cluster.num_devices
    of_number = {w.most: w for w in workers_of(cluster, devices)}
    for number in range(1, devices + 1):
        sizes = dealt(cluster, number) | ({devices // number} if devices % number == 0 else set())
        if sizes:
            assert (of_number[number].least_devices, of_number[number].most_devices) == (min(sizes), max(sizes))
        else:
            assert number not in of_number


def test_many_workers_are_taken_together():
    every = list(workers_of(cluster_of(16, 8), 128))
    assert [w.most for w in every] == [*range(1, 17), 33, 67, 128]
    assert all(a.most_devices >= b.most_devices for a, b in itertools.pairwise(every))
    assert every[-1].least_devices == 1


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_kernels_of_microbatches_are_started_in_each_of_them(workers):
    """Without a chain, a worker has its share of the operators once a microbatch."""
    fn, args = train_step(("tanh",) * 6, 16, 64, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(cluster_of(1, 4))
    freedom = Freedom(one_stage=False, most_stages=workers, is_synchronous=False)
    four, eight, sixteen = (work_bound_s(graph, cost, replace(freedom, microbatches=n)) for n in (4, 8, 16))
    assert sixteen - eight == pytest.approx(2 * (eight - four))
    products = 3 * 6 - 1  # the batch asks for no gradient
    assert eight - four >= 4 * products / workers
    assert work_bound_s(graph, cost, freedom) < four  # one microbatch is free


def test_of_one_stage_too():
    fn, args = train_step(("tanh",) * 3, 16, 64, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(cluster_of(1, 4))
    one, four = (work_bound_s(graph, cost, Freedom(microbatches=n)) for n in (1, 4))
    assert four - one >= 3 * (3 * 3 - 1)
    assert work_bound_s(graph, cost, Freedom()) == one


def test_few_microbatches_wait_and_many_start_more():
    """With one microbatch no two operators of its chain run at once, on whatever workers; with many all start them."""
    fn, args = train_step(("tanh",) * 8, 16, 64, 0.9)
    graph, cost = graph_of(fn, *args), CostModel(cluster_of(1, 8))
    stages = Freedom(one_stage=False, most_stages=8)
    free, one, most = (work_bound_s(graph, cost, replace(stages, microbatches=n)) for n in (None, 1, 64))
    unbound = work_bound_s(graph, cost, replace(stages, is_synchronous=False))
    assert unbound < free == one < most
