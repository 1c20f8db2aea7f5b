"""Processes that each carry out the lists of their workers: the bits of the lists in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime_hosts.launch import results, run

TWO: dict[str, Any] = {"manual": {"dp": 2, "pp": 2}, "num_stages": 2, "num_microbatches": 4}
SIZES = {"layers": 4, "hidden": 16, "batch": 16}


def both(processes: int, devices: int, example: str, cases: list[dict[str, Any]], sizes: dict[str, Any]) -> list[Any]:
    """What each process of a world found, and what one process with as many devices does."""
    options: dict[str, Any] = {"example": example, "cases": cases, "sizes": sizes, "limit_s": 560}
    worlds = results(run("train", processes, devices=devices, **options))
    assert all(found == worlds[0] for found in worlds)
    (alone,) = results(run("train", 1, devices=devices * processes, **options))
    for case, found, plain in zip(cases, worlds[0], alone, strict=True):
        assert found["worst"] < 1e-10, case
        assert found["digest"] == plain["digest"], case
    return list(worlds[0])


@pytest.mark.timeout(600)
def test_two_processes_have_the_bits_of_one() -> None:
    cases = [{**TWO, "schedule": "1f1b", "donate_argnums": [0]}, {**TWO, "schedule": "chimera"}]
    for found in both(2, 2, "mlp", cases, SIZES):
        assert found["stages"] == 2 and set(found["processes"]) == {1}  # state lies on its stage's process alone


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("schedule", "processes"), [("2bw", 2), ("2bw", 4), ("pipedream", 2)])
def test_calls_without_a_flush_have_the_bits_of_one_process(schedule: str, processes: int) -> None:
    options: dict[str, Any] = {"schedule": schedule, "dp": 2, "limit_s": 560}
    worlds = results(run("without_flush", processes, devices=4 // processes, parts=True, **options))
    assert all(found == worlds[0] for found in worlds)
    (alone,) = results(run("without_flush", 1, devices=4, parts=False, **options))
    assert worlds[0] == alone


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("example", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("processes", [2, 4])
def test_models_in_processes_have_the_bits_of_one(example: str, processes: int) -> None:
    cases = [
        {**TWO, "manual": {"dp": 4, "pp": 2}, "schedule": "zb-h1", "donate_argnums": [0]},
        {**TWO, "manual": {"dp": 4, "pp": 2}, "schedule": "1f1b"},
    ]
    both(processes, 8 // processes, example, cases, {})
