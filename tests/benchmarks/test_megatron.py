"""The published configurations, and what is made of their plans."""

from __future__ import annotations

import csv

import pytest

from benchmarks import megatron
from benchmarks.published.dataset import POINTS


@pytest.mark.parametrize("case", megatron.CASES, ids=lambda c: c.name)
def test_configurations_have_the_published_size(case):
    h, layers = case.hidden, case.layers
    parameters = 12 * layers * h**2 * (1 + 13 / (12 * h) + (case.vocab + case.seq) / (12 * layers * h))  # equation 2
    assert parameters / 1e9 == pytest.approx(float(case.name.removesuffix("B")), abs=0.06)
    assert case.tp * case.pp * case.dp == case.devices
    assert case.count * case.dp * case.microbatch == case.batch
    assert case.layers % (case.pp * case.chunks) == case.devices % megatron.PER_NODE == 0


@pytest.mark.slow
def test_measured_configurations_are_those_of_the_data():
    with POINTS.open(newline="", encoding="utf-8") as lines:
        points = {r["case"]: r for r in csv.DictReader(lines) if r["dataset"] == "SC21 Table 1"}
    measured = {c.name: c for c in megatron.CASES if c.measured_s is not None}
    assert len(measured) == 5 and set(measured) <= set(points)
    names = {
        "heads": "heads", "hidden": "hidden", "layers": "layers", "tp": "tp", "pp": "pp", "dp": "dp",
        "devices": "devices", "global_batch": "batch", "micro_batch": "microbatch", "vpp_chunks": "chunks",
        "vocab": "vocab", "seq": "seq", "iteration_s": "measured_s",
    }  # fmt: skip
    for name, case in measured.items():
        assert {k: float(points[name][k]) for k in names} == {k: getattr(case, v) for k, v in names.items()}
        assert points[name]["recompute"] == "full"


def test_the_best_of_each_kind_are_compared():
    case = megatron.CASES[0]
    rows = [
        {"whose": "published", "way": "published", "step_s": 2.0, "device_peak_bytes": 2 * megatron.MEMORY_BYTES},
        {"whose": "ours", "way": "a", "step_s": 3.0, "device_peak_bytes": 10},
        {"whose": "ours", "way": "b", "step_s": 1.0, "device_peak_bytes": megatron.MEMORY_BYTES},
        {"whose": "ours", "way": "too large", "step_s": 0.5, "device_peak_bytes": megatron.MEMORY_BYTES + 1},
        {"whose": "ours", "way": "c", "error": "nothing fits"},
        {"whose": "megatron", "way": "grids", "error": "nothing fits"},
    ]
    row = megatron.summary(case, rows)
    assert row["way"] == "b" and row["ours / published"] == 0.5 and row["ours / best grid"] is None
    assert megatron.met(row)
    assert not megatron.met(megatron.summary(case, rows[:2]))
    assert not megatron.met(megatron.summary(case, rows[1:]))
    faster = {"whose": "megatron", "way": "grids", "step_s": 0.9, "device_peak_bytes": 10}
    assert not megatron.met(megatron.summary(case, [*rows, faster]))


@pytest.mark.slow
def test_a_tiny_configuration_is_planned_in_every_way():
    (case,) = megatron.QUICK
    rows = megatron.measure(case)
    assert [r["way"] for r in rows] == [w.name for w in megatron.ways(case)]
    assert all(r["stages"] == case.pp for r in rows[:2])
    assert megatron.met(megatron.summary(case, rows)), rows
