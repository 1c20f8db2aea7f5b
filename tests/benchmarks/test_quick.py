from __future__ import annotations

import pytest

from autopar.lower.hlo import collectives
from benchmarks import memory_limit, predicted
from benchmarks.experts import cases
from benchmarks.replica_groups import listed_groups


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


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", "{{0,1,2,3},{4,5,6,7}}"),
        ("mesh['a'=2,'b'=4] {'a'}", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("mesh['a'=8,'b'=1] {'a'}", "{{0,1,2,3,4,5,6,7}}"),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", "{{0,2},{1,3},{4,6},{5,7}}"),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "{{0,1},{2,3},{4,5},{6,7}}"),
        ("mesh['a'=4,'c'=1,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", "{{0,1,2,3},{4,5,6,7}}"),
    ],
)
def test_groups_of_mesh_axes_are_listed(written: str, groups: str) -> None:
    assert listed_groups(f"x, replica_groups={written}, y") == f"x, replica_groups={groups}, y"


def test_listed_groups_are_read() -> None:
    text = listed_groups(
        "HloModule m, num_partitions=8\n\nENTRY main {\n  p = f32[4]{0} parameter(0)\n"
        "  ROOT r = f32[4]{0} all-reduce(p), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=sum\n}\n"
    )
    (found,) = collectives(text)
    assert (found.group_size, found.full_bytes) == (4, 16)
