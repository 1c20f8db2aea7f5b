"""Processes that each carry out the lists of their workers: the values of one device, the bits of one process.

Where bits are compared one process has the collectives of several (gloo): XLA's own for one process add up in another
order.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import autopar
from tests.runtime_hosts import drawn_lists
from tests.runtime_hosts.launch import results, run

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera")
TWO_STAGES_A_WORKER = ("interleaved", "zb-v")
#: By model its sizes: with two stages a worker four stages have to be cut.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"batch": 16},
    "llama": {"batch": 16},
    "moe": {"batch": 16},
    "encoder_decoder": {},
}
MESHES = ({"dp": 4}, {"dp": 2, "tp": 2})


def case(number: int, schedule: str) -> dict[str, Any]:
    """A schedule with the ``number``-th mesh, recomputation and donation: pairs of these meet over models."""
    chunks = 2 if schedule in TWO_STAGES_A_WORKER else 1
    manual = {"pp": 2, **MESHES[number % 2], **({"chunks": chunks} if chunks > 1 else {})}
    more = {"recompute": "full"} if number // 2 % 2 else {}
    donated = {"donate_argnums": [0]} if number % 3 == 0 else {}
    return {
        "manual": {**manual, **more},
        "num_stages": 2 * chunks,
        "num_microbatches": 4,
        "schedule": schedule,
        **donated,
    }


def of_model(model: str, schedules: tuple[str, ...] = SCHEDULES) -> list[dict[str, Any]]:
    """Cases of a model, by number of layers."""
    at = sorted(MODELS).index(model)
    some = [(s, case(at + n, s)) for n, s in enumerate(schedules)]
    deep = [c for s, c in some if s in TWO_STAGES_A_WORKER and model != "encoder_decoder"]
    flat = [c for _, c in some if c not in deep]
    sizes = MODELS[model]
    models = [{"example": model, "sizes": sizes, "cases": flat}]
    return [*models, {"example": model, "sizes": {**sizes, "layers": 4}, "cases": deep}] if deep else models


def both(processes: int, models: list[dict[str, Any]]) -> None:
    """Asserts that processes find the values of one device and the bits of one process with as many devices."""
    options: dict[str, Any] = {"models": models, "limit_s": 1700}
    worlds = results(run("trained_models", processes, devices=8 // processes, **options))
    assert all(found == worlds[0] for found in worlds)
    (alone,) = results(run("trained_models", 1, devices=8, gloo=True, **options))
    for model, found, plain in zip(models, worlds[0], alone, strict=True):
        for asked, one, other in zip(model["cases"], found, plain, strict=True):
            assert one["worst"] < 1e-10, (model["example"], asked)
            assert one["digest"] == other["digest"], (model["example"], asked)
            assert one["stages"] == asked["num_stages"]


def test_cases_have_each_schedule_with_each_mesh_recomputation_and_donation() -> None:
    met = set()
    for model in MODELS:
        for one in itertools.chain.from_iterable(m["cases"] for m in of_model(model)):
            wanted = ("tp" in one["manual"], "recompute" in one["manual"], "donate_argnums" in one)
            met |= {(one["schedule"], n, value) for n, value in enumerate(wanted)}
    assert met == set(itertools.product(SCHEDULES, range(3), (False, True)))


@pytest.mark.timeout(120)
def test_two_processes_have_the_values_of_one_device() -> None:
    first, second = results(run("two_stages", 2, devices=1, limit_s=100))
    assert max(first["worst"], second["worst"]) < 1e-12
    assert (first["examples"], second["examples"]) == (16, 0)
    assert (first["here"], second["here"]) == (["a"], ["b"])  # state lies on its stage's process alone


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_models_in_two_processes(model: str) -> None:
    both(2, of_model(model))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "schedules"), [("gpt", ("zb-h1",)), ("encoder_decoder", ("1f1b", "interleaved"))])
def test_models_in_four_processes(model: str, schedules: tuple[str, ...]) -> None:
    both(4, of_model(model, schedules))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("example", "schedule", "processes"),
    [("gpt", "2bw", 2), ("encoder_decoder", "2bw", 2), ("mlp", "2bw", 4), ("mlp", "pipedream", 2)],
)
def test_calls_without_a_flush_have_the_bits_of_one_process(example: str, schedule: str, processes: int) -> None:
    sizes: dict[str, Any] = {"batch": 16, "optimizer": "adam"} if example == "mlp" else MODELS[example]
    options: dict[str, Any] = {"schedule": schedule, "dp": 2, "limit_s": 560, "example": example, "sizes": sizes}
    worlds = results(run("without_flush", processes, devices=4 // processes, parts=True, **options))
    assert all(found == worlds[0] for found in worlds)
    (alone,) = results(run("without_flush", 1, devices=4, parts=False, gloo=True, **options))
    assert worlds[0]["digests"] == alone["digests"]
    assert worlds[0]["worst"] < 1e-10


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
