"""Errors of datasets that are left out of a fit, by stack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published import fit
from benchmarks.published.dataset import Run, load
from benchmarks.published.transformer import load_constants

SPEED = "megatron-deepspeed"


@dataclass(frozen=True)
class Scored:
    """A run that takes as many seconds as a stack has bytes of `partition_bytes`."""

    run: Run
    error: float
    prediction: Any


def scored(runs: Iterable[Run], constants: Any) -> tuple[Scored, ...]:
    predicted_s = constants.stacks[SPEED].partition_bytes
    step = SimpleNamespace(step_s=predicted_s)
    return tuple(Scored(run, predicted_s / run.measured_s - 1, step) for run in runs if run.measured_s)


def test_a_dataset_is_predicted_by_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two datasets of which one measured 20 seconds and the other 40; a third has a stack of its own."""
    monkeypatch.setattr(fit, "score", scored)
    monkeypatch.setattr(fit, "ranking", lambda found: SimpleNamespace(correlation=1.0, regret=len(found) / 100))
    run = load()[0]
    runs = [
        replace(run, dataset=name, measured_s=measured_s, stack=stack)
        for name, measured_s, stack, count in (("a", 20.0, SPEED, 4), ("b", 40.0, SPEED, 4), ("c", 40.0, "xla", 1))
        for _ in range(count)
    ]
    rows = fit.leave_one_out(load_constants(), runs, 4)
    a, b, c, by_speed, by_xla, by_all = rows
    assert [r["dataset"] for r in (a, b, c)] == ["a", "b", "c"]
    assert a["mean"] == pytest.approx(1.0, abs=0.1)  # b says 40
    assert b["mean"] == pytest.approx(0.5, abs=0.1) and b["bias"] < 0  # a says 20
    assert (by_speed["stack"], by_speed["runs"], by_speed["mean"]) == (SPEED, 8, (a["mean"] + b["mean"]) / 2)
    assert (by_xla["stack"], by_xla["mean"], by_xla["regret"]) == ("xla", c["mean"], 0.01)
    assert by_all["mean"] == pytest.approx((a["mean"] + b["mean"] + c["mean"]) / 3)
