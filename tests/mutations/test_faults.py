"""Every fault can still be put in, and the one that is quickest to try is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.mutations.run import ROOT, caught, faults


def test_there_are_forty_faults_on_all_floors_that_plan() -> None:
    assert len(faults()) >= 40
    assert len({f.name for f in faults()}) == len(faults())
    rooms = {f.file.split("/")[1] for f in faults()}
    assert {"cost", "ir", "microbatch", "recompute", "schedule", "search", "sharding", "simulate", "solver"} <= rooms


@pytest.mark.parametrize("fault", faults(), ids=lambda f: f.name)
def test_a_fault_can_be_put_in(fault) -> None:
    assert fault.old != fault.new
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.tests and all((ROOT / t.partition("::")[0]).exists() for t in fault.tests)


def test_a_fault_is_caught_and_none_where_nothing_is_wrong(tmp_path) -> None:
    (fault,) = (f for f in faults() if f.name == "an all-reduce moves half of its bytes")
    for name in "ab":
        (tmp_path / name).mkdir()
    assert caught(fault, tmp_path / "a").startswith("FAILED")
    assert caught(replace(fault, new=fault.old + " "), tmp_path / "b") == ""
