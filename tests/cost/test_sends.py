"""One price of a send: inside a node, between nodes, and between node groups of unequal sizes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.cost import send_s
from autopar.search.pipeline.partition import Submesh
from autopar.search.pipeline.profiling import boundary_s
from autopar.search.pipeline.record import transfer_s

DEVICE = Device("toy", 10**9, 1e12, {"f32": 1e12})
NVLINK = LinkSpec(300e9, 1e-6)
CARD = LinkSpec(12.5e9, 1e-5, node_bandwidth=10e9)
SLOW = LinkSpec(5e9, 2e-5)
#: Devices 0-7 are one node, 8-11 and 12-15 are two nodes of four.
UNEQUAL = Cluster("unequal", (NodeGroup(1, 8, DEVICE, NVLINK, CARD), NodeGroup(2, 4, DEVICE, NVLINK, SLOW)))
GB = 1e9


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        ((0,), (7,), 1e-6 + GB / 300e9),  # inside a node
        ((8,), (12,), 2e-5 + GB / 5e9),  # two nodes of the second group, once taken for one node of eight
        ((8, 9), (10, 11), 1e-6 + GB / 2 / 300e9),
        ((4, 5, 6, 7), (8, 9, 10, 11), 2e-5 + GB / 4 / 2.5e9),  # the card of the first node is shared by four
        ((0,), (8,), 2e-5 + GB / 5e9),  # the slower of two links
        ((0, 1, 2, 3, 4, 5, 6, 7), (12,), 2e-5 + GB / 5e9),  # one lane
    ],
)
def test_seconds(source, target, seconds):
    assert send_s(UNEQUAL, GB, source, target) == pytest.approx(seconds, rel=1e-12)


def test_links_within_a_slice_reach_all_nodes():
    torus = Cluster("torus", (NodeGroup(4, 4, DEVICE, NVLINK, "intra"),))
    assert send_s(torus, GB, (0,), (15,)) == pytest.approx(1e-6 + GB / 300e9, rel=1e-12)


def test_efficiency_counts_once():
    link = dataclasses.replace(NVLINK, efficiency=0.5)
    cluster = Cluster("slow", (NodeGroup(1, 2, DEVICE, link, "intra"),))
    assert send_s(cluster, GB, (0,), (1,)) == pytest.approx(1e-6 + GB / 150e9, rel=1e-12)


def test_pipelines_pay_it_between_nodes_of_a_second_group():
    source, target = (SimpleNamespace(stages=(SimpleNamespace(devices=d),)) for d in ((8,), (12,)))
    assert transfer_s(UNEQUAL, GB, source, target) == pytest.approx(2e-5 + GB / 5e9, rel=1e-12)


@pytest.mark.slow
def test_the_dynamic_program_pays_it_at_the_cuts_of_a_second_group():
    layers = SimpleNamespace(cut_bytes=(GB,))
    seconds = boundary_s(UNEQUAL, Submesh(1, 4), layers)
    assert seconds.tolist() == pytest.approx([0.0, 2e-5 + GB / 4 / 5e9, 0.0], rel=1e-12)
