"""Every fault can still be put in, and the one that is quickest to try is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.mutations.draw import drawn
from tests.mutations.run import DRAWN, ROOT, Fault, caught, faults, fits


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


def test_drawn_faults_are_of_all_packages_and_most_can_still_be_put_in() -> None:
    kept = faults(DRAWN)
    assert len(kept) + len(faults()) >= 120
    assert len({f.file.split("/")[1] for f in kept}) >= 18
    assert sum(map(fits, kept)) >= 0.75 * len(kept)  # else draw again
    assert sum(bool(f.tests) for f in kept) >= 0.6 * len(kept)
    assert all(f.old != f.new for f in kept) and len({f.name for f in kept}) == len(kept)
    assert all((ROOT / t.partition("::")[0]).exists() for f in kept for t in f.tests)


def test_draws_are_of_the_seed_and_can_be_put_in(tmp_path) -> None:
    for name in ("cost/collectives.py", "cost/compute.py", "sharding/paths.py", "schedule/memory.py"):
        path = tmp_path / "autopar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text((ROOT / "autopar" / name).read_text(encoding="utf-8"))
    found = drawn(tmp_path, 1, 18)
    assert found == drawn(tmp_path, 1, 18) != drawn(tmp_path, 2, 18)
    assert {f.file.split("/")[1] for f in found} == {"cost", "schedule", "sharding"}
    assert len({f.name.partition(" in ")[0] for f in found}) >= 5
    assert all((ROOT / f.file).read_text(encoding="utf-8").count(f.old) == 1 for f in found)


def quick() -> Fault:
    """A fault that one test of formulas catches."""
    (named,) = (f for f in faults() if f.name == "an all-reduce moves half of its bytes")
    return replace(named, tests=("tests/cost/test_collectives.py::test_large_all_reduces_are_near_measured_ones",))


def test_a_fault_is_caught(tmp_path) -> None:
    assert caught(quick(), tmp_path).startswith("FAILED")


def test_a_fault_is_not_caught_by_a_test_that_is_slow(tmp_path) -> None:
    slow = "tests/mutations/test_faults.py::test_nothing_is_caught_where_nothing_is_wrong"
    assert caught(replace(quick(), tests=(slow,)), tmp_path) == ""


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_wrong(tmp_path) -> None:
    assert caught(replace(quick(), new=quick().old + " "), tmp_path) == ""
