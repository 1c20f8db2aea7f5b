"""Figures fitted to measured times: known figures are found again, also under noise, and the file can be loaded."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import AutoparError, Cluster
from autopar.cluster import Link
from autopar.cost.calibrated_file import Circumstances, MeasuredGroup, file_text
from autopar.cost.calibration import Sample, fit, fit_link, link_error
from autopar.cost.collectives import collective_on_link_s

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
