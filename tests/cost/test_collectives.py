"""Collectives against the formulas written out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Link, LogicalMesh
from autopar.cost import (
    KINDS,
    CostModel,
    all_reduce_tree_s,
    collective_on_link_s,
    collective_s,
    tree_latency_s,
    wire_bytes,
)

sizes = st.integers(2, 512)
amounts = st.floats(0, 1e12)
links = st.builds(Link, bandwidth=st.floats(1e6, 1e12), latency_s=st.floats(0, 1e-3))
kinds = st.sampled_from(KINDS)


def _written_out(kind, m, n, alpha, beta):
    if kind == "all-reduce":
        return 2 * (n - 1) * alpha + 2 * (n - 1) / n * m * beta
    if kind in ("all-gather", "reduce-scatter"):
        return (n - 1) * alpha + (n - 1) / n * m * beta
    if kind == "all-to-all":
        return (n - 1) * alpha + (n - 1) / (n * n) * m * beta
    return alpha + m * beta


@given(kinds, amounts, sizes, links)
def test_formulas(kind, m, n, link):
    mesh = LogicalMesh((("x", n),), (link,))
    expected = _written_out(kind, m, n, link.latency_s, 1 / link.bandwidth)
    assert collective_s(kind, m, ("x",), mesh) == pytest.approx(expected, rel=1e-9)
    assert collective_on_link_s(kind, m, n, link) == collective_s(kind, m, ("x",), mesh)
    assert wire_bytes(kind, m, n) == pytest.approx(_written_out(kind, m, n, 0, 1), rel=1e-9)


@pytest.mark.slow
@given(amounts, sizes, links)
def test_all_reduce_is_reduce_scatter_and_all_gather(m, n, link):
    parts = [collective_on_link_s(k, m, n, link) for k in ("reduce-scatter", "all-gather")]
    assert collective_on_link_s("all-reduce", m, n, link) == pytest.approx(sum(parts))
    assert wire_bytes("all-reduce", m, n) == pytest.approx(2 * wire_bytes("all-gather", m, n))


@given(kinds, amounts, amounts, sizes, links)
def test_more_bytes_cost_no_less(kind, a, b, n, link):
    low, high = sorted((a, b))
    assert collective_on_link_s(kind, low, n, link) <= collective_on_link_s(kind, high, n, link)
    assert wire_bytes(kind, low, n) <= wire_bytes(kind, high, n)


@given(kinds, amounts, links)
def test_one_device_costs_nothing(kind, m, link):
    mesh = LogicalMesh((("x", 1), ("y", 4)), (link, link))
    assert collective_s(kind, m, ("x",), mesh) == collective_s(kind, m, (), mesh) == 0
    assert collective_on_link_s(kind, m, 1, link) == wire_bytes(kind, m, 1) == 0
    assert tree_latency_s(1, link) == all_reduce_tree_s(m, 1, link) == 0


@given(kinds, amounts)
def test_several_axes_are_one_group(kind, m):
    cluster = Cluster.load("dgx-a100", nodes=2)
    (mesh,) = cluster.logical_meshes((2, 8))
    (flat,) = cluster.logical_meshes((16,))
    assert collective_s(kind, m, ("x", "y"), mesh) == collective_s(kind, m, ("x",), flat)


def test_an_all_reduce_over_both_axes_beats_one_after_the_other():
    (mesh,) = Cluster.load("dgx-a100", nodes=2).logical_meshes((2, 8))
    apart = sum(collective_s("all-reduce", 1e9, (axis,), mesh) for axis in ("x", "y"))
    assert collective_s("all-reduce", 1e9, ("x", "y"), mesh) < apart


@given(amounts, st.sampled_from([2, 4, 8, 256]), links)
def test_a_tree_has_the_bytes_of_a_ring_and_less_latency(m, n, link):
    assert tree_latency_s(n, link) == pytest.approx(2 * math.log2(n) * link.latency_s)
    transfer = wire_bytes("all-reduce", m, n) / link.bandwidth
    assert all_reduce_tree_s(m, n, link) == pytest.approx(tree_latency_s(n, link) + transfer)
    if n >= 4:
        assert all_reduce_tree_s(m, n, link) <= collective_on_link_s("all-reduce", m, n, link)


def test_the_model_may_choose_the_tree():
    """Of devices whose kernels are not known: others take the lesser of ring and tree by themselves."""
    cluster = Cluster.load("local-cpu", nodes=32)
    (mesh,) = cluster.logical_meshes((256,))
    ring = CostModel(cluster).collective_s("all-reduce", 1e3, ("x",), mesh)
    best = CostModel(cluster, all_reduce="best").collective_s("all-reduce", 1e3, ("x",), mesh)
    assert ring == collective_s("all-reduce", 1e3, ("x",), mesh)
    assert best == all_reduce_tree_s(1e3, 256, mesh.link(("x",))) < ring
    gathers = [CostModel(cluster, all_reduce=a).collective_s("all-gather", 1e3, ("x",), mesh) for a in ("ring", "best")]
    assert gathers[0] == gathers[1]


def test_wrong_arguments_are_refused():
    mesh = LogicalMesh((("x", 2),), (Link(1e9, 1e-6),))
    with pytest.raises(ValueError, match="'broadcast'"):
        collective_s("broadcast", 1.0, ("x",), mesh)
    with pytest.raises(KeyError, match="z"):
        collective_s("all-reduce", 1.0, ("z",), mesh)
    with pytest.raises(ValueError, match="not 0"):
        wire_bytes("all-reduce", 1.0, 0)


@pytest.mark.parametrize(
    ("name", "nodes", "size", "measured_s", "most"),
    [
        # nccl-tests and torch benchmarks; sources as in the cluster files.
        ("dgx-a100", 1, 8589934592, 64074e-6, 1.1),
        ("h200", 1, 67108864, 338.92e-6, 1.25),
        ("dgx-h100", 8, 17179869184, 93796.1e-6, 1.1),
        ("b200", 4, 17179869184, 87181.76e-6, 1.1),
    ],
)
def test_large_all_reduces_are_near_measured_ones(name, nodes, size, measured_s, most):
    cluster = Cluster.load(name, nodes=nodes)
    (mesh,) = cluster.logical_meshes((cluster.num_devices,))
    ratio = CostModel(cluster).collective_s("all-reduce", size, ("x",), mesh) / measured_s
    assert 1 / most < ratio < most
