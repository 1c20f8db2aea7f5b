"""Whether nodes are joined by slower links than those inside them."""

from __future__ import annotations

import dataclasses

import pytest

from autopar import Cluster
from autopar.cluster import LinkSpec


@pytest.mark.parametrize(
    ("nodes", "bandwidth", "node_bandwidth", "slower"),
    [
        (2, 100e9, None, False),
        (2, 99e9, None, True),
        (2, 100e9, 800e9, False),
        (2, 100e9, 799e9, True),  # eight devices that send at once
        (1, 1e9, 1e9, False),
    ],
)
def test_a_network_is_slower_by_what_a_device_has_of_it(
    nodes: int, bandwidth: float, node_bandwidth: float | None, slower: bool
) -> None:
    like = Cluster.load("dgx-a100").groups[0]
    intra = dataclasses.replace(like.intra, bandwidth=100e9)
    inter = LinkSpec(bandwidth, 1e-6, node_bandwidth=node_bandwidth)
    group = dataclasses.replace(like, count=nodes, devices_per_node=8, intra=intra, inter=inter)
    assert Cluster("some", (group,)).has_slower_network is slower


def test_a_torus_that_joins_all_nodes_is_no_slower_network() -> None:
    like = Cluster.load("dgx-a100").groups[0]
    group = dataclasses.replace(like, count=4, inter="intra")
    assert not Cluster("slice", (group,)).has_slower_network
