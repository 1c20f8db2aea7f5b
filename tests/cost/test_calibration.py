"""Figures fitted to measured times: known figures are found again, also under noise, and the file can be loaded."""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import AutoparError, Cluster
from autopar.cluster import Link
from autopar.cost import CostModel
from autopar.cost.calibrated_file import Circumstances, MeasuredGroup, file_text
from autopar.cost.calibration import Sample, collectives_of, fit, fit_link, link_error
from autopar.cost.collectives import collective_on_link_s, measured_s
from autopar.cost.constants import load_constants
from autopar.cost.kernels import Matrices, kernel_rates
from autopar.runtime.measured_programs import QUICK

CALL_S, LAUNCH_S, FLOPS, BANDWIDTH = 2e-4, 3e-6, 5e10, 2e10
LINK = Link(1.5e9, 2e-5)
HOW = Circumstances(datetime.date(2026, 1, 2), "a processor", "jax 0.10.2", 9)


def sample(what: str, name: str, amount: float, once_s: float, runs: int = 10, group: int = 1, noise: float = 0.0):
    rng = np.random.default_rng(round(amount) + runs)
    seconds = (CALL_S + runs * once_s) * (1 + noise * rng.uniform(-1, 1, 9))
    return Sample(what, name, amount, runs, group, tuple(seconds.tolist()))  # type: ignore[arg-type]


def samples(noise: float = 0.0, devices: int = 8) -> list[Sample]:
    found = [sample("call", "", 1, 0.0, 1, noise=noise)]
    found += [sample("chain", "", n, n * LAUNCH_S, 1000, noise=noise) for n in (8, 32, 128)]
    for n in (128, 256, 512, 1024):
        reached = 1.0 if n > 200 else 0.5
        found.append(sample("product", "f32", 2.0 * n**3, LAUNCH_S + 2.0 * n**3 / FLOPS / reached, noise=noise))
        found.append(sample("product", "bf16", 2.0 * n**3, LAUNCH_S + n**3 / FLOPS, noise=noise))
    found += [sample("copy", "f32", 2.0**k, LAUNCH_S + 2.0**k / BANDWIDTH, 100, noise=noise) for k in (20, 24, 28)]
    if devices > 1:
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
            for size in (2**12, 2**18, 2**24):
                once = collective_on_link_s(kind, size, devices, LINK)
                found.append(sample("collective", kind, size, once, 20, devices, noise))
    return found


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-6), (0.05, 0.15)])
def test_known_figures_are_found_again(noise: float, within: float) -> None:
    found = fit(samples(noise))
    assert found.call_s == pytest.approx(CALL_S, rel=within)
    assert found.launch_s == pytest.approx(LAUNCH_S, rel=within)
    rates = dict(found.products)
    assert rates["f32"].peak == pytest.approx(FLOPS, rel=within)
    assert rates["bf16"].peak == pytest.approx(2 * FLOPS, rel=within)
    assert rates["f32"].efficiency.at(2 * 128**3) == pytest.approx(0.5, rel=2 * within)
    assert found.memory.peak == pytest.approx(BANDWIDTH, rel=within)
    assert found.link is not None
    assert found.link.bandwidth == pytest.approx(LINK.bandwidth, rel=within)
    assert found.link.latency_s == pytest.approx(LINK.latency_s, rel=within)
    assert found.link_error <= within
    assert (found.chain_spread > 0) == (noise > 0)


@given(st.floats(1e8, 1e12), st.floats(1e-7, 1e-3))
def test_any_link_is_found_again(bandwidth: float, latency_s: float) -> None:
    link = Link(bandwidth, latency_s)
    found = [
        Sample("collective", kind, size, 1, 4, (collective_on_link_s(kind, size, 4, link),) * 2)
        for kind in ("all-reduce", "all-gather")
        for size in (1e3, 1e6, 1e9)
    ]
    assert link_error(found, 0.0, fit_link(found, 0.0)) < 1e-3


@pytest.mark.parametrize("devices", [1, 8])
def test_the_file_is_a_cluster(tmp_path: Path, devices: int) -> None:
    group = Cluster.load("local-cpu").groups[0]
    found = fit(samples(0.02, devices))
    text = file_text("mine", [MeasuredGroup(dataclasses.replace(group, count=3), found, HOW)])
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    cluster = Cluster.load(tmp_path / "mine.toml")
    (read,) = cluster.groups
    assert cluster.name == "mine" and (read.count, read.devices_per_node) == (3, 8)
    assert read.device.launch_s == pytest.approx(found.launch_s, rel=1e-3)
    assert read.device.flops("bf16") == pytest.approx(2 * FLOPS, rel=0.1)
    assert read.device.memory_bandwidth == pytest.approx(BANDWIDTH, rel=0.1)
    measured = devices > 1
    assert (read.intra.bandwidth == pytest.approx(LINK.bandwidth, rel=0.1)) == measured
    assert (
        "2026-01-02" in text
        and "spread" in text
        and ("not measured" in text.partition("[groups.inter]")[0]) != measured
    )


def test_what_is_missing_is_said() -> None:
    with pytest.raises(AutoparError, match="chains of two lengths"):
        fit([s for s in samples() if s.what != "chain"])
    with pytest.raises(AutoparError, match="products in f32"):
        fit([s for s in samples() if s.name != "f32"])


def device_s(kind: str, nbytes: float, group: int) -> float:
    """A synthetic device: threads that wait for each other cost a level of a tree each, permutes wait for all."""
    if kind == "collective-permute":
        return 6e-5 + nbytes / 3e9
    wire = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 1.0, "all-to-all": 1 / group}[kind]
    return 2.5e-5 * math.log2(group) + wire * nbytes / 3e9


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = (2.0**10, 2.0**14, 2.0**18, 2.0**22)


def grouped(noise: float = 0.0) -> list[Sample]:
    """Collectives of groups of 2, 4 and 8, each of neighbours and of devices far apart."""
    return [
        sample("collective", kind, size, device_s(kind, size, group), 100 + far, group, noise)
        for kind in KINDS
        for group in (2, 4, 8)
        for size in SIZES
        for far in range(1 + (group < 8))
    ]


def read_again(tmp_path: Path, collectives: list[Sample]) -> Cluster:
    plain = [s for s in samples() if s.what != "collective"]
    measured = MeasuredGroup(Cluster.load("local-cpu").groups[0], fit([*plain, *collectives]), HOW)
    (tmp_path / "mine.toml").write_text(file_text("mine", [measured]), encoding="utf-8")
    return Cluster.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.05, 0.15)])
def test_groups_of_every_size_are_priced_as_they_were_measured(tmp_path: Path, noise: float, within: float) -> None:
    """On 8, 2x4 and 4x2, at the sizes that were measured and at those between; no ring gives such latencies."""
    cluster = read_again(tmp_path, grouped(noise))
    cost = CostModel(cluster)
    for shape in ((8,), (2, 4), (4, 2)):
        (mesh,) = cluster.logical_meshes(shape)
        for axis, group in mesh.axes:
            for kind in KINDS:
                for size in (*SIZES, 2.0**12, 3e6):
                    want = pytest.approx(device_s(kind, size, group), rel=within)
                    assert cost.collective_s(kind, size, (axis,), mesh) == want
                assert cost.collective_s(kind, 8 * SIZES[-1], (axis,), mesh) == pytest.approx(
                    device_s(kind, 8 * SIZES[-1], group), rel=2 * within
                )
    (mesh,) = cluster.logical_meshes((2, 4))
    assert cost.collective_s("all-reduce", 1e5, ("x", "y"), mesh) == pytest.approx(
        device_s("all-reduce", 1e5, 8), rel=within
    )


def test_groups_between_and_beyond_the_measured_ones(tmp_path: Path) -> None:
    """6 devices lie between 4 and 8, 16 have more messages than 8, and cluster files without groups keep the ring."""
    cluster = read_again(tmp_path, grouped())
    link = cluster.groups[0].intra
    four, six, eight, sixteen = (measured_s("all-gather", 1e5, n, link) for n in (4, 6, 8, 16))
    assert four is not None and six is not None and eight is not None and sixteen is not None
    assert four < six < eight < sixteen < 3 * eight
    assert measured_s("all-gather", 1e5, 1, link) == measured_s("all-gather", 0.0, 8, link) == 0.0
    assert measured_s("send", 1e5, 2, link) is None
    old = Cluster.load("local-cpu")
    (mesh,) = old.logical_meshes((2, 4))
    ring_s = collective_on_link_s("all-gather", 1e5, 4, mesh.link(("y",)))
    assert CostModel(old).collective_s("all-gather", 1e5, ("y",), mesh) == ring_s


#: Bytes of a matrix between whose products there are all-reduces.
HELD_BYTES = 2.0**18


def between(longer_s: float) -> list[Sample]:
    """Products, alone and with an all-reduce that takes so much longer than in a row."""
    least_s = {n: device_s("all-reduce", SIZES[0], n) for n in (2, 4)}
    waits = [sample("between", "all-reduce", HELD_BYTES, 1.5e-3 + s + longer_s, group=n) for n, s in least_s.items()]
    return [sample("between", "", HELD_BYTES, 1.5e-3), *waits]


def test_collectives_between_products_refill_caches(tmp_path: Path) -> None:
    """A conversion of as many bytes and of more takes as much longer, of half of them half; the table is of a row."""
    cluster = read_again(tmp_path, [*grouped(), *between(3e-4)])
    cost, (mesh,) = CostModel(cluster), cluster.logical_meshes((8,))
    assert cost.refill_s(HELD_BYTES) == pytest.approx(3e-4, rel=1e-3)
    assert cost.refill_s(np.array([0.0, HELD_BYTES / 2, 9 * HELD_BYTES])) == pytest.approx([0, 1.5e-4, 3e-4], rel=1e-3)
    for size in SIZES:
        in_a_row_s = pytest.approx(device_s("all-reduce", size, 8), rel=1e-3)
        assert cost.collective_s("all-reduce", size, ("x",), mesh) == in_a_row_s


@pytest.mark.parametrize("waits", [between(-1e-5), between(0.0)[:1], []])
def test_collectives_that_take_no_longer_between_products_refill_nothing(tmp_path: Path, waits: list[Sample]) -> None:
    cluster = read_again(tmp_path, [*grouped(), *waits])
    assert cluster.groups[0].intra.refill_bandwidth is None
    assert CostModel(cluster).refill_s(HELD_BYTES) == 0.0 and not CostModel(cluster).refills
    assert not CostModel(Cluster.load("local-cpu")).refills


def test_fewer_bytes_that_took_longer_are_noise() -> None:
    took = [Sample("collective", "all-reduce", b, 1, 2, (s,) * 2) for b, s in ((1e3, 2e-5), (1e4, 1e-5), (1e6, 1e-3))]
    (found,) = collectives_of(took, 0.0)
    assert [x for p in found.seconds for x in p] == pytest.approx([1e3, 2e-5, 1e4, 2e-5, 1e6, 1e-3])


def test_an_accelerator_keeps_its_kernels_by_size_and_takes_the_rates_of_large_ones(tmp_path: Path) -> None:
    """As measured on one H200: 758 TFLOP/s in bf16, 370 in f32 of TF32 cores, 4 TB/s read and written."""
    listed = Cluster.load("h200").part(0, 1)
    rates = {"bf16": 758e12, "f32": 370e12}
    found = [sample("call", "", 1, 0.0, 1)]
    found += [sample("chain", "", n, n * LAUNCH_S, 1000) for n in (8, 32, 128)]
    for n in (4096, 8192):
        found += [sample("product", name, 2.0 * n**3, LAUNCH_S + 2.0 * n**3 / rate) for name, rate in rates.items()]
    found += [sample("copy", "f32", 2.0**k, LAUNCH_S + 2.0**k / 4e12, 100) for k in (29, 31)]
    path = tmp_path / "gpu.toml"
    path.write_text(file_text("gpu", [MeasuredGroup(listed.groups[0], fit(found), HOW)]), encoding="utf-8")
    cluster = Cluster.load(str(path))
    device, rates_of_kernels = cluster.groups[0].device, kernel_rates(cluster.groups[0].device, load_constants())
    assert rates_of_kernels is not None and not device.convolutions and device.reorder_efficiency is None
    assert rates_of_kernels.memory_s(4e9, device) == pytest.approx(1e-3, rel=1e-3)
    large = Matrices(1, 16384, 16384, 16384)
    for name, rate in rates.items():
        seconds = rates_of_kernels.product_s(large, name, device, misaligned=False, moved=large.moved_bytes)
        assert float(seconds) == pytest.approx(large.flops / rate, rel=0.1)
    assert device.flops("f8_e4m3fn") == listed.groups[0].device.flops("f8_e4m3fn")


def test_what_is_measured_fills_an_accelerator() -> None:
    effort = QUICK.on_accelerators()
    assert 2.0 * min(effort.products) ** 3 > 100e9 and min(effort.copies) > 200e6
    assert (effort.repeats, effort.least_s) == (QUICK.repeats, QUICK.least_s)
