"""Figures of the links between workers: known ones are found again, and the file that holds them can be loaded."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import AutoparError, Cluster
from autopar.cluster import Link
from autopar.cost.calibrated_file import Circumstances, MeasuredGroup, file_text
from autopar.cost.calibration import Calibration, Rate
from autopar.cost.links import LinkSample, Network, fit_network, transfer_s

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)


def shapes(workers: int, devices: int) -> list[LinkSample]:
    """What is measured of so many workers, without times."""
    pairs = [(a, b) for a in range(workers) for b in range(a + 1, workers)]
    found = [("bounce", p, lanes, 1) for p in pairs for lanes in dict.fromkeys((1, devices))]
    if workers > 2:
        found.append(("fan", tuple(range(workers)), devices, 1))
    found.append(("chain", tuple(range(workers)), devices, 4))
    return [LinkSample(how, who, size, lanes, count, ()) for how, who, lanes, count in found for size in SIZES]


def timed(workers: int, devices: int, known: Network, noise: float = 0.0) -> list[LinkSample]:
    rng = np.random.default_rng(workers)
    return [
        dataclasses.replace(s, seconds=tuple((transfer_s(s, known) * (1 + noise * rng.uniform(-1, 1, 9))).tolist()))
        for s in shapes(workers, devices)
    ]


def network(bandwidth: float, latency_s: float, node_bandwidth: float | None) -> Network:
    return Network(Link(bandwidth, latency_s), node_bandwidth, 0.0, 0.0, None)


KNOWN = network(3e9, 4e-5, 8e9)


@pytest.mark.parametrize(
    ("how", "workers", "lanes", "count", "seconds"),
    [
        ("bounce", 2, 1, 1, 4e-5 + 6e6 / 3e9),
        ("bounce", 2, 4, 1, 4e-5 + 6e6 / 8e9),
        ("fan", 4, 1, 1, 8e-5 + 3 * 6e6 / 8e9),  # there and back; all three share the node's network
        ("chain", 3, 1, 4, 6 * 4e-5 + 5 * 6e6 / 3e9),  # four leave one by one, the last goes one further; the answer
        ("chain", 2, 4, 4, 5 * 4e-5 + 4 * 6e6 / 8e9),
    ],
)
def test_what_the_figures_say(how: str, workers: int, lanes: int, count: int, seconds: float) -> None:
    sample = LinkSample(how, tuple(range(workers)), 6_000_000, lanes, count, ())  # type: ignore[arg-type]
    assert transfer_s(sample, KNOWN) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.slow
@given(
    st.floats(1e7, 1e12), st.floats(1e-6, 1e-2), st.floats(0.2, 8.0), st.integers(2, 5), st.sampled_from((1, 2, 4, 8))
)
def test_any_link_is_found_again(bandwidth: float, latency_s: float, share: float, workers: int, devices: int) -> None:
    """Each of the three figures, where the slowest and the longest transfers tell both latency and bandwidth."""
    node = bandwidth * share if devices > 1 or workers > 2 else None
    known = network(bandwidth, latency_s, node)
    found = fit_network(timed(workers, devices, known))
    # Latency that is lost in the shortest transfer, or bandwidth in the longest, is told only so well.
    if SIZES[0] / bandwidth < 1e4 * latency_s:
        assert found.link.latency_s == pytest.approx(latency_s, rel=1e-3)
    if latency_s < 1e4 * SIZES[-1] / bandwidth:
        assert found.link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
        if node is not None:
            assert found.node_bandwidth == pytest.approx(node, rel=1e-3)
    assert (found.node_bandwidth is None) == (node is None)
    assert found.error < 1e-6 and found.spread == pytest.approx(0.0, abs=1e-9)
    assert found.chain_share == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_known_figures_are_found_under_noise(workers: int, devices: int) -> None:
    known = KNOWN if devices > 1 or workers > 2 else network(3e9, 4e-5, None)
    samples = timed(workers, devices, known, 0.1)
    found = fit_network(samples)
    assert found.link.latency_s == pytest.approx(4e-5, rel=0.1)
    assert found.link.bandwidth == pytest.approx(3e9, rel=0.1)
    assert (
        found.node_bandwidth is None
        if known.node_bandwidth is None
        else found.node_bandwidth == pytest.approx(8e9, rel=0.1)
    )
    assert 0 < found.error < 0.1 and 0 < found.spread < 0.2
    # A transfer of another size than any that was measured.
    fresh = LinkSample("bounce", (0, 1), 3_000_000, devices, 1, ())
    assert transfer_s(fresh, found) == pytest.approx(transfer_s(fresh, known), rel=0.1)


def test_chains_that_overlap_are_told_and_not_fitted() -> None:
    samples = timed(3, 2, KNOWN)
    quicker = [
        dataclasses.replace(s, seconds=tuple(0.25 * t for t in s.seconds)) if s.how == "chain" else s for s in samples
    ]
    found = fit_network(quicker)
    assert found.chain_share == pytest.approx(0.25)
    assert found.link.bandwidth == pytest.approx(3e9, rel=1e-6)
    assert fit_network([s for s in samples if s.how != "chain"]).chain_share is None


def test_noise_that_hides_a_figure_leaves_possible_ones() -> None:
    """Larger arrays that took less time, and times without any latency."""
    backwards = [LinkSample("bounce", (0, 1), size, 1, 1, (1e-3 / n,)) for n, size in enumerate(SIZES, 1)]
    found = fit_network(backwards)
    assert found.link.bandwidth == pytest.approx(max(s.bytes / s.median_s for s in backwards))
    assert found.link.latency_s > 0
    no_latency = [LinkSample("bounce", (0, 1), size, 1, 1, (size / 1e9 * (1 + n),)) for n, size in enumerate(SIZES)]
    found = fit_network(no_latency)
    assert found.link.latency_s == 0.0 and 0 < found.link.bandwidth < 1e9


def test_one_size_is_too_little() -> None:
    with pytest.raises(AutoparError, match=r"transfers of two sizes\n.*give two in Effort"):
        fit_network([s for s in timed(2, 4, KNOWN) if s.lanes > 1 or s.bytes == SIZES[0]])


def measured(count: int, kind: str, found: Network | None) -> MeasuredGroup:
    base = Cluster.load("local-cpu").groups[0]
    device = dataclasses.replace(base.device, kind=kind, jax_kinds=(kind,))
    group = dataclasses.replace(base, count=count, devices_per_node=2, device=device)
    rate = Rate(1e10, group.device.compute_efficiency, 0.0)
    figures = Calibration(1e-4, 1e-6, (("f32", rate),), rate, Link(1e9, 1e-5), 0.0, 0.0, 0.0)
    how = Circumstances(datetime.date(2026, 1, 2), "a processor", "jax 0.10.2", 9)
    return MeasuredGroup(group, figures, how, found, f"{count} workers on {count} machines, over sockets", 2e-3)


def test_the_file_is_a_cluster_of_all_workers(tmp_path: Path) -> None:
    one, other = fit_network(timed(3, 2, KNOWN, 0.05)), network(5e8, 1e-4, None)
    text = file_text("mine", [measured(3, "an A", one), measured(2, "a B", other), measured(1, "a C", None)])
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    a, b, c = Cluster.load(tmp_path / "mine.toml").groups
    assert [(g.count, g.device.kind) for g in (a, b, c)] == [(3, "an A"), (2, "a B"), (1, "a C")]
    assert a.inter.bandwidth == pytest.approx(one.link.bandwidth, rel=1e-3)
    assert a.inter.latency_s == pytest.approx(one.link.latency_s, rel=1e-3)
    assert a.inter.node_bandwidth == pytest.approx(one.node_bandwidth, rel=1e-3)
    assert (b.inter.bandwidth, b.inter.latency_s, b.inter.node_bandwidth) == (5e8, 1e-4, None)
    assert c.inter == Cluster.load("local-cpu").groups[0].inter
    assert [g.measured for g in (a, b, c)] == ["2026-01-02 on a processor, jax 0.10.2"] * 3
    sections = text.split("[groups.inter]")[1:]
    assert "between 3 workers on 3 machines, over sockets" in sections[0]
    assert f"spread {one.spread:.1%}" in sections[0] and "follow each other" in sections[0]
    assert "A call by the driver takes 0.002 s" in sections[0]
    assert "follow each other" not in sections[1]
    assert "Not measured" in sections[2] and text.count("2026-01-02") == 6


def test_a_plan_says_that_its_prices_were_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(file_text("mine", [measured(1, "an A", None)]), encoding="utf-8")
    cluster = Cluster.load(tmp_path / "mine.toml")
    assert Cluster.from_json(cluster.to_json()) == cluster
    shapes = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    said = "measured 2026-01-02 on a processor, jax 0.10.2"
    plan = autopar.parallelize(lambda w, x: x @ w, cluster=cluster).plan(*shapes)
    assert said in plan.content.cluster_name and said in str(plan) and said in plan._repr_html_()
    assert said in autopar.Plan.from_json(plan.to_json()).content.cluster_name
    guessed = autopar.parallelize(lambda w, x: x @ w, cluster=Cluster.load("local-cpu")).plan(*shapes)
    assert "measured" not in guessed.content.cluster_name
