from __future__ import annotations

import pytest

from benchmarks import memory_limit, predicted
from benchmarks.experts import cases


def test_experts_move_no_fewer_bytes() -> None:
    report = cases.run(True, print)
    (row,) = report.rows
    assert row["holds"] and row["autopar_bytes"] > 0
    assert row["arithmetic split"] == pytest.approx(1, rel=0.01)


def test_predicted_bytes_are_the_compiled_ones() -> None:
    report = predicted.run(True, print)
    assert report.passed
    assert all(row["compiled_bytes"] > 0 for row in report.rows)


def test_memory_limits_shrink_the_plan() -> None:
    rows = memory_limit.run(True, print).rows
    predicted_bytes = [row["predicted_bytes"] for row in rows if "predicted_bytes" in row]
    assert len(predicted_bytes) >= 3
    assert predicted_bytes == sorted(predicted_bytes, reverse=True)
    assert all(row["predicted_bytes"] <= row["limit_bytes"] for row in rows[1:] if "predicted_bytes" in row)
