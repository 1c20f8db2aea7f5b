"""Clusters built in code, curves, and clusters of this process's devices."""

import math
import pickle
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Curve, Device, LinkSpec, MeasuredCollective, NodeGroup
from autopar.errors import ClusterError

LINK = LinkSpec(1e9, 1e-6)


def _device(**changes):
    return Device(**{"kind": "D", "memory_bytes": 1, "memory_bandwidth": 1.0, "peak_flops": {"f32": 1.0}, **changes})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: _device(memory_bytes=0), "Device.memory_bytes"),
        (lambda: _device(memory_bytes=1.5), "Device.memory_bytes"),
        (lambda: _device(memory_bandwidth=math.nan), "Device.memory_bandwidth"),
        (lambda: _device(peak_flops={"f32": -1}), r"Device.peak_flops.f32"),
        (lambda: _device(peak_flops={"bf16": 1}), "no f32"),
        (lambda: _device(launch_s=-1), "Device.launch_s"),
        (lambda: _device(kind=""), "Device.kind"),
        (lambda: LinkSpec("fast", 0), "LinkSpec.bandwidth"),
        (lambda: LinkSpec(1e9, -1), "LinkSpec.latency_s"),
        (lambda: LinkSpec(1e9, 0, efficiency=2), "LinkSpec.efficiency"),
        (lambda: LinkSpec(1e9, 0, node_bandwidth=0), "LinkSpec.node_bandwidth"),
        (lambda: LinkSpec(1e9, 0, torus_dims=0), "LinkSpec.torus_dims"),
        (lambda: MeasuredCollective("all-reduce", 1, ((1.0, 1.0),)), "devices is 1"),
        (lambda: MeasuredCollective("all-reduce", 2, ()), "no points"),
        (lambda: MeasuredCollective("all-reduce", 2, ((1.0, 1.0), (2.0, 0.5))), "must rise"),
        (lambda: LinkSpec(1e9, 0, refill_bandwidth=0.0), "LinkSpec.refill_bandwidth"),
        (lambda: LinkSpec(1e9, 0, refill_bytes=-1.0), "LinkSpec.refill_bytes"),
        (lambda: LinkSpec(1e9, 0, collectives=(MeasuredCollective("send", 2, ((1.0, 1.0),)),) * 2), "twice"),
        (lambda: NodeGroup(0, 1, _device(), LINK, LINK), "NodeGroup.count"),
        (lambda: NodeGroup(1, True, _device(), LINK, LINK), "NodeGroup.devices_per_node"),
        (lambda: NodeGroup(1, 1, _device(), LINK, "none"), "NodeGroup.inter"),
        (lambda: NodeGroup(1, 1, _device(), LINK, LINK, host_memory_bytes=-1), "NodeGroup.host_memory_bytes"),
        (lambda: NodeGroup(1, 1, _device(), LINK, LINK, host_bandwidth=0), "NodeGroup.host_bandwidth"),
        (lambda: Cluster("c", ()), "no node groups"),
        (lambda: Curve(()), "no points"),
        (lambda: Curve(((2.0, 0.5), (1.0, 0.6))), "must rise"),
    ],
)
def test_impossible_values_name_the_field(make, field):
    with pytest.raises(ClusterError, match=field):
        make()


def test_clusters_are_plain_values():
    cluster = Cluster("c", [NodeGroup(2, 2, _device(peak_flops={"f32": 1, "bf16": 2}), LINK, "intra")])
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len({cluster, Cluster.from_json(cluster.to_json())}) == 1
    assert cluster.groups[0].device.peak_flops == (("bf16", 2.0), ("f32", 1.0))
    assert str(cluster) == "c: 2 x 2 D"


@given(st.floats(1e-3, 1e15))
def test_a_curve_stays_between_its_neighbours(amount):
    curve = Curve(((1e3, 0.2), (1e6, 0.5), (1e9, 0.9)))
    value = curve.at(amount)
    assert 0.2 <= value <= 0.9
    assert curve.at(amount * 2) >= value - 1e-12


def test_a_curve_is_linear_in_the_logarithm():
    curve = Curve(((1e2, 0.2), (1e6, 0.6)))
    assert [curve.at(x) for x in (0, 1, 1e2, 1e6, 1e9)] == [0.2, 0.2, 0.2, 0.6, 0.6]
    assert curve.at(1e4) == pytest.approx(0.4)
    assert Curve.constant(0.7).at(123) == 0.7
    assert Curve(((5.0, 0.7),)) == Curve.constant(0.7)


def test_measured_seconds_are_a_line_between_points_and_beyond_them():
    measured = MeasuredCollective("all-reduce", 4, ((1e3, 2e-5), (1e5, 3e-5), (1e6, 1e-4)))
    assert [measured.at(b) for b in (1, 1e3, 1e5, 1e6)] == pytest.approx([2e-5, 2e-5, 3e-5, 1e-4])
    assert measured.at(5.05e4) == pytest.approx(2.5e-5)
    assert measured.at(1e6 + 999e3) == pytest.approx(1e-4 + 8e-5)
    assert MeasuredCollective("all-reduce", 4, ((1e3, 2e-5),)).at(3e3) == pytest.approx(6e-5)


def _found(kind, platform="gpu", limit=None, process=0, slice=0):
    stats = None if limit is None else {"bytes_limit": limit}
    return SimpleNamespace(
        platform=platform, device_kind=kind, memory_stats=lambda: stats, process_index=process, slice_index=slice
    )


def test_local_devices_have_the_figures_of_the_file_that_knows_them():
    cluster = Cluster.local([_found("NVIDIA H200")] * 4)
    assert (cluster.num_nodes, cluster.num_devices) == (1, 4)
    assert cluster.device_types == Cluster.load("h200").device_types
    assert Cluster.local([_found("TPU v5 lite", "tpu")]).device_types == Cluster.load("tpu-v5e").device_types


def test_local_memory_is_what_jax_may_allocate():
    assert Cluster.local(
        [_found("NVIDIA H200", limit=10**11), _found("NVIDIA H200", limit=9 * 10**10)]
    ).memory_bytes == (9 * 10**10)
    assert Cluster.local([_found("NVIDIA H200", limit=10**15)]).memory_bytes == Cluster.load("h200").memory_bytes


def test_local_cpu_devices():
    cluster = Cluster.local()
    assert cluster.name == "local-cpu" or jax.default_backend() != "cpu"
    assert cluster.num_devices == len(jax.local_devices())
    cpu = jax.local_devices(backend="cpu")[:1]
    assert Cluster.local(cpu * 3).num_devices == 3


def test_local_devices_that_no_file_knows():
    with pytest.raises(ClusterError, match="'Abacus 9000'") as caught:
        Cluster.local([_found("Abacus 9000")])
    assert "NVIDIA H200" in caught.value.cause
    with pytest.raises(ClusterError, match="kinds A, B"):
        Cluster.local([_found("A"), _found("B")])
    with pytest.raises(ClusterError, match="no devices"):
        Cluster.local([])


def test_devices_of_several_processes_are_nodes_of_their_kind():
    # A process a node with CPUs; of GPUs what one fast network joins, however many processes that are.
    cpus = [_found("cpu", "cpu", process=p) for p in (0, 0, 0, 1, 1, 1)]
    assert [(g.count, g.devices_per_node) for g in Cluster.local(cpus).groups] == [(2, 3)]
    gpus = [_found("NVIDIA H200", process=p, slice=p // 4) for p in range(8)]
    assert [(g.count, g.devices_per_node) for g in Cluster.local(gpus).groups] == [(2, 4)]
    uneven = [_found("NVIDIA H200", process=p, slice=s) for p, s in enumerate((0, 0, 0, 0, 1, 1))]
    assert [(g.count, g.devices_per_node) for g in Cluster.local(uneven).groups] == [(1, 4), (1, 2)]
    mixed = [*gpus, *(_found("NVIDIA B200", process=8, slice=8) for _ in range(8))]
    assert [g.device.jax_kinds[0] for g in Cluster.local(mixed).groups] == ["NVIDIA B200", "NVIDIA H200"]


def test_slices_of_tpus_are_nodes_with_their_network_between_them():
    one = [_found("TPU v5p", "tpu", process=p // 4) for p in range(8)]
    (group,) = Cluster.local(one).groups
    assert (group.count, group.devices_per_node, group.inter) == (2, 4, "intra")
    two = [_found("TPU v5p", "tpu", process=p // 4, slice=p // 8) for p in range(16)]
    (group,) = Cluster.local(two).groups
    assert (group.count, group.devices_per_node, group.inter.bandwidth) == (2, 8, 6.25e9)
    assert Cluster.from_json(Cluster.local(two).to_json()) == Cluster.local(two)
