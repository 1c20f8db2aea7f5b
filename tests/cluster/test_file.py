"""Cluster files: what is refused, how it is said, and that what is written is read back."""

import copy
import math
import re
import tomllib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, ConvolutionRate, Curve, Device, LinkSpec, MeasuredCollective, NodeGroup, available
from autopar.cluster.catalog import find, read
from autopar.errors import ClusterError

GOOD = """
name = "two"
[[groups]]
count = 2
devices_per_node = 4
host_memory_bytes = 1e12
host_bandwidth = 25e9
[groups.device]
kind = "D"
memory_bytes = 16e9
memory_bandwidth = 1e12
peak_flops = { bf16 = 2e14, f32 = 1e14 }
compute_efficiency = [[1e6, 0.1], [1e9, 0.8]]
memory_efficiency = 0.9
launch_s = 1e-6
jax_kinds = ["D one"]
[groups.intra]
bandwidth = 100e9
latency_s = 1e-6
[groups.inter]
bandwidth = 10e9
latency_s = 1e-5
node_bandwidth = 20e9
efficiency = 0.9
"""


def _data():
    return tomllib.loads(GOOD)


def _table(data, path):
    for key in path:
        data = data[key]
    return data


GROUP = ("groups", 0)
DEVICE = (*GROUP, "device")
INTRA = (*GROUP, "intra")
INTER = (*GROUP, "inter")


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(GOOD)
    cluster = Cluster.load(str(path))
    assert cluster == Cluster.load(path) == Cluster.from_dict(_data())
    assert (cluster.name, cluster.num_nodes, cluster.num_devices) == ("two", 2, 8)
    (group,) = cluster.groups
    assert group.device.memory_bytes == 16_000_000_000
    assert isinstance(group.device.memory_bytes, int)
    assert group.device.flops("bf16") == 2e14
    assert group.device.flops("i32") == group.device.flops("f32") == 1e14
    assert group.inter == LinkSpec(10e9, 1e-5, efficiency=0.9, node_bandwidth=20e9)
    assert Cluster.load(path, nodes=5).num_devices == 20


KINDS = {
    "convolution_efficiency": 0.5,
    "kernel_gradient_efficiency": [[1e6, 0.1], [1e9, 0.2]],
    "convolutions": [{"kind": "convolution", "spatial_dims": 2, "multiplication_s": 1e-10, "window_s": 1e-9}],
    "reorder_efficiency": [[1024.0, 0.1]],
    "reduction_efficiency": 0.25,
    "first_touch_bandwidth": 2e9,
    "function_s": {"exp": 3e-10},
}


def test_figures_of_kinds_of_work_are_read():
    data = _data()
    _table(data, DEVICE).update(KINDS)
    device = Cluster.from_dict(data).groups[0].device
    assert device.convolution_efficiency == Curve.constant(0.5)
    assert device.kernel_gradient_efficiency == Curve(((1e6, 0.1), (1e9, 0.2)))
    assert device.convolutions == (ConvolutionRate("convolution", 2, 1e-10, 1e-9),)
    assert device.reorder_efficiency == Curve.constant(0.1)
    assert device.reduction_efficiency == Curve.constant(0.25)
    assert (device.first_touch_bandwidth, device.function_s) == (2e9, (("exp", 3e-10),))


def test_a_device_without_them_has_the_plain_form_that_it_had():
    (group,) = Cluster.from_dict(_data()).to_dict()["groups"]
    assert set(group["device"]) == set(_table(_data(), DEVICE))


@pytest.mark.parametrize(
    ("path", "fact", "valid"),
    [
        ((), "unknown key typo", "groups"),
        (GROUP, "unknown key groups[0].typo", "devices_per_node"),
        (DEVICE, "unknown key groups[0].device.typo", "memory_bandwidth"),
        (INTRA, "unknown key groups[0].intra.typo", "latency_s"),
        (INTER, "unknown key groups[0].inter.typo", "node_bandwidth"),
    ],
)
def test_an_unknown_key_is_named_and_the_valid_ones_listed(path, fact, valid):
    data = _data()
    _table(data, path)["typo"] = 1
    with pytest.raises(ClusterError, match="unknown key") as caught:
        Cluster.from_dict(data)
    assert caught.value.fact == f"cluster: {fact}"
    assert valid in caught.value.remedy


REQUIRED = [
    ("name",),
    ("groups",),
    *((*GROUP, k) for k in ("count", "devices_per_node", "device", "intra", "inter")),
    *((*DEVICE, k) for k in ("kind", "memory_bytes", "memory_bandwidth", "peak_flops")),
    *((*link, k) for link in (INTRA, INTER) for k in ("bandwidth", "latency_s")),
]


def _text(path):
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


@pytest.mark.parametrize("path", REQUIRED, ids=_text)
def test_a_missing_key_is_named(path):
    data = _data()
    del _table(data, path[:-1])[path[-1]]
    with pytest.raises(ClusterError, match=re.escape(f"missing key {_text(path)}")) as caught:
        Cluster.from_dict(data)
    assert f"{path[-1]} (required)" in caught.value.remedy


NUMBERS = [
    *((*GROUP, k) for k in ("count", "devices_per_node", "host_memory_bytes", "host_bandwidth")),
    *((*DEVICE, k) for k in ("memory_bytes", "memory_bandwidth", "launch_s", "memory_efficiency")),
    (*DEVICE, "peak_flops", "bf16"),
    *((*link, k) for link in (INTRA, INTER) for k in ("bandwidth", "latency_s", "efficiency")),
    (*INTER, "node_bandwidth"),
    (*INTRA, "torus_dims"),
    (*INTRA, "switch_share"),
]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "8", True, None, 0], ids=repr)
@pytest.mark.parametrize("path", NUMBERS, ids=_text)
def test_an_impossible_number_is_named(path, value):
    data = _data()
    _table(data, path[:-1])[path[-1]] = value
    optional = ("host_memory_bytes", "host_bandwidth", "node_bandwidth", "switch_share")
    allowed_none = path[-1] in optional and value is None
    if allowed_none or (value == 0 and value is not False and path[-1] in ("launch_s", "latency_s")):
        assert Cluster.from_dict(data).num_devices == 8
        return
    with pytest.raises(ClusterError, match=re.escape(_text(path))):
        Cluster.from_dict(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), ""),
        (("name",), 3),
        (("groups",), []),
        (("groups",), {}),
        ((*GROUP, "count"), 1.5),
        ((*GROUP, "inter"), "outer"),
        ((*GROUP, "device"), "H100"),
        ((*DEVICE, "memory_bytes"), 1.5),
        ((*DEVICE, "kind"), ""),
        ((*DEVICE, "peak_flops"), {"bf16": 1e12}),
        ((*DEVICE, "peak_flops"), [1e12]),
        ((*DEVICE, "compute_efficiency"), []),
        ((*DEVICE, "compute_efficiency"), 1.1),
        ((*DEVICE, "compute_efficiency"), [[1e6, 0.5], [1e5, 0.6]]),
        ((*DEVICE, "compute_efficiency"), [[1e6, 0.5, 0.6]]),
        ((*DEVICE, "compute_efficiency"), [[1e6, 1.5]]),
        ((*DEVICE, "jax_kinds"), "D"),
        ((*DEVICE, "convolution_efficiency"), 0),
        ((*DEVICE, "kernel_gradient_efficiency"), [[1e6, 1.5]]),
        ((*DEVICE, "convolutions"), [{"kind": "pooling", "spatial_dims": 2, "multiplication_s": 1e-10}]),
        ((*DEVICE, "convolutions"), [{"kind": "convolution", "spatial_dims": 0, "multiplication_s": 1e-10}]),
        (
            (*DEVICE, "convolutions"),
            [{"kind": "convolution", "form": "patches", "spatial_dims": 2, "multiplication_s": 1e-10}],
        ),
        ((*DEVICE, "convolutions"), [{"kind": "convolution", "spatial_dims": 2, "multiplication_s": 0}]),
        (
            (*DEVICE, "convolutions"),
            [{"kind": "convolution", "spatial_dims": 2, "multiplication_s": 1, "result_s": -1}],
        ),
        ((*DEVICE, "reorder_efficiency"), [[4096, 0.5], [1024, 0.6]]),
        ((*DEVICE, "reduction_efficiency"), []),
        ((*DEVICE, "first_touch_bandwidth"), -1.0),
        ((*DEVICE, "function_s"), {"exp": 0}),
        ((*DEVICE, "function_s"), {"exp": "fast"}),
        ((*DEVICE, "function_s"), 1e-9),
        ((*INTER, "efficiency"), 1.01),
        ((*INTRA, "collectives"), [{"kind": "sum", "devices": 2, "seconds": [[1.0, 1.0]]}]),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 1, "seconds": [[1.0, 1.0]]}]),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 2, "seconds": []}]),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 2, "seconds": [[1.0, 1.0]]}] * 2),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 2, "seconds": [[1.0, 0.0]]}]),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 2, "seconds": [[2.0, 1.0], [1.0, 2.0]]}]),
        ((*INTRA, "collectives"), [{"kind": "all-gather", "devices": 2, "seconds": [[1.0, 2.0], [2.0, 1.0]]}]),
    ],
    ids=str,
)
def test_other_impossible_values_are_named(path, value):
    data = _data()
    _table(data, path[:-1])[path[-1]] = value
    with pytest.raises(ClusterError, match=re.escape(_text(path))):
        Cluster.from_dict(data)


def test_rates_of_an_older_version_are_to_be_measured_again():
    data = _data()
    rate = {"kind": "convolution", "spatial_dims": 3, "multiplication_s": 1e-10, "run_s": 1e-8}
    _table(data, DEVICE)["convolutions"] = [rate]
    with pytest.raises(ClusterError, match=r"unknown key groups\[0\]\.device\.convolutions\[0\]\.run_s") as caught:
        Cluster.from_dict(data)
    assert "scattered_s" in caught.value.remedy and "`autopar calibrate`" in caught.value.remedy


def test_not_toml_not_there_not_json(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ClusterError, match=r"broken\.toml cannot be read as TOML"):
        Cluster.load(path)
    with pytest.raises(ClusterError, match="no cluster file"):
        Cluster.load(tmp_path / "absent.toml")
    with pytest.raises(ClusterError, match="not the JSON of a cluster"):
        Cluster.from_json("{")
    with pytest.raises(ClusterError, match="expected `object`"):
        Cluster.from_json("[]")


def test_an_unknown_name_lists_the_known_and_suggests_the_closest():
    with pytest.raises(ClusterError, match="no cluster called 'dgx-a10'") as caught:
        Cluster.load("dgx-a10")
    assert "did you mean 'dgx-a100'?" in caught.value.remedy
    assert all(name in caught.value.remedy for name in available())


NAMES = (
    "b200",
    "dgx-a100",
    "dgx-a100-40gb",
    "dgx-a800",
    "dgx-h100",
    "dgx-h800",
    "h200",
    "t4",
    "local-cpu",
    "p3.16xlarge",
)
NAMES += ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")


def test_the_files_are_those_that_the_documentation_names():
    assert list(available()) == sorted(available())
    assert set(NAMES) <= set(available())


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_sound(name):
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert Cluster.from_json(cluster.to_json()) == cluster
    device = cluster.groups[0].device
    assert device.jax_kinds
    assert device.flops("bf16") >= device.flops("f32") or name in ("p3.16xlarge", "t4", "local-cpu")
    lines = find(name).read_text().splitlines()
    bare = [b for a, b in pairwise(lines) if re.match(r"(memory_bytes|peak_flops|bandwidth) =", b) and a[:1] != "#"]
    assert not bare, "figures without a source in the comment above them"


def test_no_two_files_claim_one_kind_of_device():
    kinds = [k for name in available() for k in Cluster.load(name).groups[0].device.jax_kinds]
    assert len(kinds) == len(set(kinds))


numbers = st.floats(1e-6, 1e20)
measured = st.builds(
    MeasuredCollective,
    kind=st.sampled_from(["all-reduce", "all-to-all"]),
    devices=st.integers(2, 9),
    seconds=st.dictionaries(numbers, st.just(1e-5), min_size=1, max_size=3).map(lambda d: tuple(sorted(d.items()))),
)
fractions = st.floats(0.001, 1.0)
links = st.builds(
    LinkSpec,
    bandwidth=numbers,
    latency_s=st.floats(0, 1),
    efficiency=fractions,
    node_bandwidth=st.none() | numbers,
    torus_dims=st.integers(1, 3),
    switch_share=st.none() | st.floats(0.1, 1.0),
    group_shares=st.dictionaries(st.integers(1, 8), fractions, max_size=3).map(lambda d: tuple(d.items())),
    collectives=st.lists(measured, max_size=3, unique_by=lambda m: (m.kind, m.devices)).map(tuple),
    refill_bandwidth=st.none() | numbers,
    refill_bytes=st.none() | st.floats(1, 1e9),
)
curves = st.dictionaries(numbers, fractions, min_size=1, max_size=4).map(lambda d: Curve(tuple(sorted(d.items()))))
rates = st.builds(
    ConvolutionRate,
    st.sampled_from(["convolution", "kernel gradient"]),
    st.integers(1, 3),
    numbers,
    *(st.floats(0, 1e-6) for _ in range(5)),
    st.sampled_from(["windows", "dilated", "loop"]),
)
devices = st.builds(
    Device,
    kind=st.text(min_size=1, max_size=8),
    memory_bytes=st.integers(1, 2**50),
    memory_bandwidth=numbers,
    peak_flops=st.dictionaries(st.sampled_from(["bf16", "f16", "i8"]), numbers).map(lambda d: {**d, "f32": 1e12}),
    compute_efficiency=curves,
    memory_efficiency=curves,
    launch_s=st.floats(0, 1),
    jax_kinds=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    convolution_efficiency=st.none() | curves,
    kernel_gradient_efficiency=st.none() | curves,
    convolutions=st.lists(rates, max_size=3).map(tuple),
    reorder_efficiency=st.none() | curves,
    reduction_efficiency=st.none() | curves,
    first_touch_bandwidth=st.none() | numbers,
    function_s=st.dictionaries(st.sampled_from(["exp", "sin"]), numbers),
)
groups = st.builds(
    NodeGroup,
    count=st.integers(1, 4),
    devices_per_node=st.integers(1, 8),
    device=devices,
    intra=links,
    inter=links | st.just("intra"),
    host_memory_bytes=st.none() | st.integers(1, 2**50),
    host_bandwidth=st.none() | numbers,
    device_dollars_per_hour=st.none() | numbers,
)
clusters = st.builds(
    Cluster, name=st.text(min_size=1, max_size=8), groups=st.lists(groups, min_size=1, max_size=3).map(tuple)
)


@given(clusters)
def test_json_round_trip(cluster):
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.to_json() == cluster.to_json()
    assert again.content_hash == cluster.content_hash


def test_the_content_hash_tells_clusters_apart():
    data = _data()
    other = copy.deepcopy(data)
    other["groups"][0]["inter"]["bandwidth"] = 11e9
    assert Cluster.from_dict(data).content_hash != Cluster.from_dict(other).content_hash
    assert len(Cluster.from_dict(data).content_hash) == 64


def test_a_local_cluster_reads_the_file_of_its_kind_alone(monkeypatch):
    pytest.importorskip("jax")
    paths = []
    monkeypatch.setattr("autopar.cluster.cluster.read", lambda path: paths.append(path.name) or read(path))
    assert Cluster.local().name == "local-cpu"
    assert paths == ["local-cpu.toml"]
