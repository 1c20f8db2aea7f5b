"""Work units against CPU seconds, of rows that are written here."""

from __future__ import annotations

import pytest

from autopar.search.clock import WEIGHTS
from autopar.solver.meter import Work
from benchmarks.report import Row
from benchmarks.work import fitted, per_unit_s, with_errors


def rows(ns_each: dict[Work, float], slower: float = 1.0) -> list[Row]:
    """Problems of one kind of work each and of two kinds, and the seconds that they take."""
    found: list[Row] = []
    for n, kind in enumerate(ns_each, 1):
        other = next(iter(ns_each))
        counts = {kind: 1e9 * n, other: 5e8}
        seconds = sum(units * 1e-9 * ns_each[k] for k, units in counts.items())
        row: Row = {"case": kind.value, "cpu_s": seconds * slower, **{k.value: units for k, units in counts.items()}}
        found.append(row)
    return found


def test_units_that_cost_alike_have_no_error_on_a_machine_of_any_speed():
    for slower in (1.0, 2.5):
        some = rows(dict.fromkeys((Work.TRACED, Work.CELLS, Work.SWEPT), 10.0), slower)
        assert per_unit_s(some) == pytest.approx(1e-8 * slower)
        assert all(row["error"] == pytest.approx(0.0) for row in with_errors(some))


def test_errors_are_the_same_on_a_slower_machine_and_alike_to_both_sides():
    each = {Work.TRACED: 10.0, Work.CELLS: 16.0, Work.SWEPT: 8.0}
    errors, slower = ([row["error"] for row in with_errors(rows(each, slower))] for slower in (1.0, 3.0))
    assert slower == pytest.approx(errors)
    assert (1 + max(errors)) * (1 + min(errors)) == pytest.approx(1.0)


def test_the_weights_that_fit_are_those_that_the_seconds_were_made_with():
    each = {Work.TRACED: 10.0, Work.CELLS: 20.0, Work.SWEPT: 5.0}
    found = fitted(rows(each))
    for kind, ns in each.items():
        assert found[kind] == pytest.approx(WEIGHTS[kind] * ns / 10.0, rel=1e-6)
