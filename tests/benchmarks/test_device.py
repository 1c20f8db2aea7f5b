"""Measurements of one accelerator: cases depend on the seed, a row says what was predicted and measured."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import autopar
from benchmarks.device import options
from benchmarks.device.__main__ import main
from benchmarks.device.kernels import seconds
from benchmarks.device.steps import cases, measured


@pytest.mark.slow
def test_cases_depend_on_the_seed_alone() -> None:
    assert cases(3, 12) == cases(3, 12) != cases(4, 12)
    assert len({name for name, _, _ in cases(0, 40)}) == 5


@pytest.mark.slow
def test_a_case_that_fails_says_why(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.device.steps.cases", lambda seed, count: [("gpt", "tiny", {"heads": 7})])
    (row,) = measured(0, 1, autopar.Cluster.load("dgx-h100").part(0, 1), float("inf"))
    assert "heads" in row["error"]


@pytest.mark.slow
def test_a_row_has_the_plan_and_the_device(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.device.steps.cases", lambda seed, count: [("mlp", "tiny", {})])
    (row,) = measured(0, 1, autopar.Cluster.load("dgx-h100").part(0, 1), float("inf"))
    assert "error" not in row
    assert row["predicted_s"] > 0 and row["measured_s"] > 0 and row["autopar_s"] > 0
    assert 0.5 < row["predicted_memory_bytes"] / row["compiled_memory_bytes"] < 2


@pytest.mark.slow
def test_seconds_are_of_one_run() -> None:
    runs = []
    took = seconds(lambda: runs.append(1) or sum(range(20_000)))
    assert len(runs) > 7 and 0 < took < 1


@pytest.mark.slow
def test_an_option_is_held_against_the_plain_step(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(options, "OPTIONS", {"two microbatches": {"num_microbatches": 2}, "none such": {"remat": "no"}})
    out = tmp_path / "rows.json"
    arguments = ["--out", str(out), "--small", "--products", "0", "--steps", "0"]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    rows = {r["name"]: r for r in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert rows["two microbatches"]["difference"] < 1e-4 and rows["two microbatches"]["measured_s"] > 0
    assert "remat" in rows["none such"]["error"]
    assert rows["callback"]["result"] == "raised: JaxRuntimeError with its text"
    assert "refused" in rows["too large"]["result"]
