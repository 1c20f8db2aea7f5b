"""Processes that each carry out the lists of their workers: models (`tests.runtime_hosts.models`) and drawn lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import autopar
from tests.runtime_hosts import drawn_lists
from tests.runtime_hosts.launch import results, run
from tests.runtime_hosts.models import APART, FACTORS, WITHOUT_FLUSH, WORST, array, found, is_possible, pairs_of

ROWS = array(0)
#: Rows of four processes: workers of two processes each, and workers of one, with a flush and without.
IN_FOUR = [
    next(n for n, row in enumerate(ROWS) if row["workers"] == workers and row["schedule"] == schedule)
    for workers, schedule in ((2, "zb-v"), (4, "zb-h1"), (4, "2bw"))
]


def check(rows: Any, processes: int) -> None:
    for one in found(rows, processes):
        assert one["worst"] < WORST and one["equal"], one


def test_rows_have_each_model_with_each_schedule_and_all_other_pairs() -> None:
    met = set[Any]().union(*map(pairs_of, ROWS))
    for model in FACTORS["model"]:
        for schedule in FACTORS["schedule"]:
            tied = schedule in WITHOUT_FLUSH and model not in APART  # the example's table is at both ends
            assert (("model", model, "schedule", schedule) in met) != tied
    assert all(is_possible(row) for row in ROWS) and array(0) == ROWS and array(1) != ROWS


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_processes_have_the_values_of_one_device() -> None:
    first, second = results(run("two_stages", 2, devices=1, limit_s=100))
    assert max(first["worst"], second["worst"]) < 1e-12
    assert (first["examples"], second["examples"]) == (16, 0)
    assert (first["here"], second["here"]) == (["a"], ["b"])  # state lies on its stage's process alone


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, len(ROWS), 4))
def test_models_in_two_processes(first: int) -> None:
    check(ROWS[first : first + 4], 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", IN_FOUR)
def test_models_in_four_processes(number: int) -> None:
    check([ROWS[number]], 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("processes", "devices", "first"), [(2, 4, 0), (3, 2, 1000), (4, 2, 2000)])
def test_drawn_lists_arrive_as_they_were_made(processes: int, devices: int, first: int) -> None:
    options: dict[str, Any] = {"cases": 12, "first": first, "limit_s": 1100}
    worlds = results(run("drawn_lists", processes, devices=devices, **options))
    assert all(one["wrong"] == [] for found in worlds for one in found)
    assert sum(one["sends"] for one in worlds[0]) > 100


def test_what_arrives_otherwise_is_noticed() -> None:
    array = np.arange(drawn_lists.SIZE, dtype=np.int32)
    placed = autopar.parallelize(lambda x: x, mesh_shape=[8])(array)
    assert drawn_lists.same_here(placed, array) and not drawn_lists.same_here(placed, array[::-1])
