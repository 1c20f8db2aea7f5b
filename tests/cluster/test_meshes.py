"""Logical meshes: which there are, where their axes lie, and what their links are."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, Link, LinkSpec, LogicalMesh, NodeGroup
from autopar.errors import ClusterError

DEVICE = Device("D", 16 * 10**9, 1e12, {"f32": 1e14})
INTRA = LinkSpec(100e9, 1e-6)
CARDS = LinkSpec(10e9, 9e-6)  # a card for each device
SHARED = LinkSpec(8e9, 9e-6, node_bandwidth=8e9)  # one card for the node


def _cluster(nodes, devices, inter=CARDS, intra=INTRA):
    return Cluster("c", (NodeGroup(nodes, devices, DEVICE, intra, inter),))


def _mesh(cluster, *shape):
    (mesh,) = cluster.logical_meshes(shape)
    return mesh


def test_one_node_has_each_shape_once():
    assert [m.shape for m in _cluster(1, 8).logical_meshes()] == [(8,), (2, 4)]
    assert [m.shape for m in _cluster(1, 16).logical_meshes()] == [(16,), (2, 8), (4, 4)]
    assert [m.shape for m in _cluster(1, 1).logical_meshes()] == [(1,)]
    assert [m.shape for m in _cluster(1, 7).logical_meshes()] == [(7,)]


def test_several_nodes_have_both_orders():
    assert [m.shape for m in _cluster(2, 4).logical_meshes()] == [(8,), (2, 4), (4, 2)]


def test_names_are_major_first():
    meshes = _cluster(2, 4).logical_meshes()
    assert [m.names for m in meshes] == [("x",), ("x", "y"), ("x", "y")]
    assert _mesh(_cluster(2, 4), 2, 2, 2).names == ("x", "y", "z")


def test_a_shape_gives_exactly_that_mesh():
    mesh = _mesh(_cluster(1, 8), 4, 2)
    assert mesh.axes == (("x", 4), ("y", 2))
    assert _mesh(_cluster(1, 8), 8, 1).link(("y",)) == Link(math.inf, 0.0)


@pytest.mark.parametrize("shape", [(3, 3), (4,), (), (8, 0), (-2, -4), (2, 2, 2, 1, 1)])
def test_a_shape_that_does_not_fit_lists_those_that_do(shape):
    with pytest.raises(ClusterError, match="does not hold the 8 devices") as caught:
        _cluster(2, 4).logical_meshes(shape)
    assert caught.value.remedy == "shapes that do: 8, 2x4, 4x2"


def test_inside_a_node_every_axis_has_the_inside_link():
    for mesh in _cluster(1, 8).logical_meshes():
        assert all(link == Link(100e9, 1e-6) for link in mesh.links)
        assert mesh.link(mesh.names) == Link(100e9, 1e-6)


def test_an_axis_of_one_device_a_node_has_its_share_of_the_network():
    mesh = _mesh(_cluster(2, 4), 2, 4)
    assert mesh.links == (Link(10e9, 9e-6), Link(100e9, 1e-6))
    mesh = _mesh(_cluster(2, 4, SHARED), 2, 4)
    assert mesh.links[0] == Link(8e9 / 4, 9e-6)


def test_an_axis_that_spans_nodes_with_several_devices_in_each():
    mesh = _mesh(_cluster(2, 4), 4, 2)  # 2 devices of a node in each group of x, 2 groups in a node
    assert mesh.links[0].bandwidth == 2 * 10e9
    assert mesh.links[0].latency_s == pytest.approx((1e-6 + 9e-6) / 2)
    assert _mesh(_cluster(2, 4, SHARED), 4, 2).links[0].bandwidth == 8e9 / 2


def test_one_ring_over_all_devices_has_the_whole_network_of_a_node():
    for inter, bandwidth in ((CARDS, 40e9), (SHARED, 8e9), (LinkSpec(1e12, 0.0), 100e9)):
        cluster = _cluster(2, 4, inter)
        assert _mesh(cluster, 8).links[0].bandwidth == bandwidth
        assert _mesh(cluster, 2, 4).link(("x", "y")) == _mesh(cluster, 8).links[0]
        assert _mesh(cluster, 4, 2).link(("y", "x")) == _mesh(cluster, 8).links[0]


def test_efficiency_scales_bandwidth():
    mesh = _mesh(_cluster(2, 4, LinkSpec(10e9, 0.0, efficiency=0.5), LinkSpec(100e9, 0.0, efficiency=0.8)), 2, 4)
    assert [k.bandwidth for k in mesh.links] == [5e9, pytest.approx(80e9)]


def test_a_slice_is_one_torus():
    cluster = _cluster(4, 4, "intra", LinkSpec(90e9, 1e-6, torus_dims=2))
    assert [m.shape for m in cluster.logical_meshes()] == [(16,), (2, 8), (4, 4)]
    mesh = _mesh(cluster, 4, 4)
    assert [k.bandwidth for k in mesh.links] == [90e9, 90e9]
    assert mesh.link(("x", "y")).bandwidth == 180e9
    assert _mesh(cluster, 2, 2, 4).link(("x", "y", "z")).bandwidth == 180e9
    assert _mesh(cluster, 16, 1).link(("x", "y")).bandwidth == 90e9


def test_a_mixed_cluster_is_as_slow_as_its_slowest_part():
    fast = NodeGroup(1, 4, DEVICE, LinkSpec(200e9, 1e-6), LinkSpec(50e9, 2e-6))
    slow = NodeGroup(1, 4, Device("S", 8 * 10**9, 5e11, {"f32": 5e13}), LinkSpec(100e9, 3e-6), LinkSpec(5e9, 4e-6))
    cluster = Cluster("mixed", (fast, slow))
    mesh = _mesh(cluster, 2, 4)
    assert mesh.links == (Link(5e9, 3e-6), Link(100e9, 3e-6))
    assert cluster.memory_bytes == 8 * 10**9
    assert [d.kind for d in cluster.devices] == ["D"] * 4 + ["S"] * 4
    assert [d.kind for d in cluster.device_types] == ["D", "S"]
    with pytest.raises(ClusterError, match="which of the 2 groups"):
        cluster.with_nodes(2)


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([CARDS, SHARED, "intra"]))
def test_all_meshes_hold_all_devices(nodes, devices, inter):
    cluster = _cluster(nodes, devices, inter)
    meshes = cluster.logical_meshes()
    assert meshes[0].shape == (nodes * devices,)
    assert len({m.shape for m in meshes}) == len(meshes)
    for mesh in meshes:
        assert mesh.size == cluster.num_devices
        assert len(mesh.shape) == 1 or min(mesh.shape) > 1
        assert len(mesh.links) == len(mesh.axes)
        assert _mesh(cluster, *mesh.shape) == mesh
        for name, n in mesh.axes:
            link = mesh.link((name,))
            assert link.bandwidth > 0
            assert (link.bandwidth <= 100e9) == (n > 1)


@given(st.sampled_from([(1, 8), (2, 4), (4, 2), (2, 6), (3, 4)]), st.sampled_from([CARDS, SHARED]))
def test_left_out_meshes_are_the_mirror_of_one_that_is_kept(size, inter):
    cluster = _cluster(*size, inter)
    n = cluster.num_devices
    kept = {m.shape: m for m in cluster.logical_meshes()}
    for a in range(2, n):
        if n % a == 0 and a < n and (a, n // a) not in kept:
            mirror = kept[(n // a, a)]
            assert _mesh(cluster, a, n // a).links == mirror.links[::-1]


def test_without_joint_links_several_axes_have_the_slowest():
    mesh = LogicalMesh((("x", 2), ("y", 4)), (Link(1e9, 5e-6), Link(2e9, 7e-6)))
    assert mesh.link(("x", "y")) == Link(1e9, 7e-6)
    assert mesh.group_size(("x", "y")) == 8
    assert str(mesh) == "2x4"


@pytest.mark.parametrize("nodes", [0, -1, 1.5, True, "2"])
def test_an_impossible_number_of_nodes(nodes):
    with pytest.raises(ClusterError, match="not a number of nodes"):
        Cluster.load("dgx-a100", nodes=nodes)


def test_meshes_of_a_cluster_are_arranged_once(monkeypatch):
    shapes = []
    module = sys.modules[Cluster.__module__]
    arranged = module.arrange
    monkeypatch.setattr(module, "arrange", lambda places, shape: shapes.append(shape) or arranged(places, shape))
    cluster = _cluster(2, 4)
    assert cluster.logical_meshes() == cluster.logical_meshes()
    assert len(shapes) == len(set(shapes)) > 1
