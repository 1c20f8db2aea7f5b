"""Collectives of plans on nodes of several devices: what the mesh says of the span, and what it costs."""

from __future__ import annotations

import pytest

from autopar import Cluster
from autopar.cost import CostModel, send_s

CLUSTER = Cluster.load("dgx-h100", nodes=4)
COST = CostModel(CLUSTER)


def test_a_mesh_knows_where_its_groups_lie():
    (mesh,) = CLUSTER.logical_meshes((8, 4))
    far, near, every = (mesh.link(axes).span for axes in (("x",), ("y",), ("x", "y")))
    assert (far.nodes, far.inside, far.senders, far.whole) == (4, 2, 8, False)
    assert (near.nodes, near.inside, near.whole) == (1, 4, False)
    assert (every.nodes, every.inside, every.whole) == (4, 8, True)


def test_a_switch_sums_for_a_whole_node_alone():
    (mesh,) = CLUSTER.part(0, 8).logical_meshes((2, 4))
    whole_s = COST.collective_s("all-reduce", 1e9, ("x", "y"), mesh)
    group = CLUSTER.groups[0]
    assert whole_s == pytest.approx(1e9 / (group.intra.bandwidth * group.intra.switch_share), rel=0.05)
    assert COST.collective_s("all-reduce", 1e9, ("y",), mesh) > whole_s


def test_small_messages_cost_latency_and_large_ones_bandwidth():
    (mesh,) = CLUSTER.logical_meshes((32,))
    small, large = (COST.collective_s("all-reduce", bytes, ("x",), mesh) for bytes in (8.0, 8e9))
    assert 20e-6 < small < 300e-6
    assert large > 8e9 / 400e9


def test_many_small_collectives_cost_more_than_one_of_their_bytes():
    (mesh,) = CLUSTER.logical_meshes((32,))
    each = COST.collective_s("all-gather", 1e5, ("x",), mesh)
    assert 1152 * each > 20 * COST.collective_s("all-gather", 1152 * 1e5, ("x",), mesh)


def test_neighbours_without_a_switch_have_the_links_between_them():
    cluster = Cluster.load("p3.16xlarge")
    cost, link = CostModel(cluster), cluster.groups[0].intra
    (pairs,), (fours,) = cluster.logical_meshes((4, 2)), cluster.logical_meshes((2, 4))
    for mesh, links in ((pairs, 1), (fours, 4)):
        ranks = mesh.shape[1]
        transfer_s = 2 * (ranks - 1) / ranks * 1e9 / (25e9 * links * link.efficiency)  # six links of 25 GB/s each
        assert cost.collective_s("all-reduce", 1e9, ("y",), mesh) == pytest.approx(transfer_s, rel=0.03)
        assert mesh.link(("y",)).bandwidth == pytest.approx(25e9 * links * link.efficiency, rel=1e-3)
    assert link.group_bandwidth(3) == link.group_bandwidth(2)
    assert link.group_bandwidth(8) == link.bandwidth
    assert send_s(cluster, 1e9, (0,), (1,)) == pytest.approx(1e9 / (25e9 * link.efficiency), rel=0.01)
