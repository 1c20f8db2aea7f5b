"""One script in several processes: the values of one device, one plan, errors of processes that differ."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runtime_hosts.launch import results, run


@pytest.mark.slow
def test_all_ways_of_calling_in_two_processes(tmp_path: Path) -> None:
    first, second = results(run("everything", limit=60_000, path=str(tmp_path / "plan.json")))
    assert first["cluster"] == ["local-cpu", 2, 8]
    assert first["same"] and first["loaded"]
    assert first["apart"] < 1e-12 and abs(first["loss"][0] / first["loss"][1] - 1) < 1e-12
    assert first["check"][0] and first["check"][1] < 1e-12
    assert first["steps"] == 2
    # Of no parameter a device has all; nor has a process, where it is split over both.
    assert max(first["pieces"], first["whole"]) <= 0.5, first["specs"]
    assert {k: v for k, v in first.items() if k != "digest"} == {k: v for k, v in second.items() if k != "digest"}
    assert first["digest"] == second["digest"]


@pytest.mark.slow
def test_processes_that_differ_get_one_typed_error_each() -> None:
    check_errors(results(run("wrong_use", environment={"AUTOPAR_WAIT_S": "4"})))


@pytest.mark.slow
def test_of_three_processes_one_differs() -> None:
    check_errors(results(run("wrong_use", 3, devices=2, environment={"AUTOPAR_WAIT_S": "6"})))


def check_errors(worlds: Sequence[Any]) -> None:
    first, last = worlds[0], len(worlds) - 1
    for name in ("program", "shape", "option", "version", "values", "init"):
        assert first[name][0] == "ProcessMismatchError", (name, first[name])
        assert all(found[name] == first[name] for found in worlds)
        assert f"process {last} differs from process 0" in first[name][1]
    assert "sin" in first["program"][1] and "tanh" in first["program"][1] and "programs.py" in first["program"][1]
    assert "f64[8,64]" in first["shape"][1] and "f64[16,64]" in first["shape"][1]
    assert "option num_microbatches is 2 there and 1 on process 0" in first["option"][1]
    assert "version of autopar is 7.7" in first["version"][1]
    assert "argument x" in first["values"][1] and "checksum" in first["values"][1]
    assert first["infeasible"][0] == "InfeasiblePlanError" and first["fine"] == ["", ""]
    assert all(found[name] == first[name] for name in ("infeasible", "fine") for found in worlds)
    for found in worlds[:-1]:
        assert found["missing"][0] == "ProcessLostError"
        assert f"process {last} of {len(worlds)} did not come" in found["missing"][1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pipeline": "lists"}, {"pipeline": "one_program"}], ids=str)
def test_a_callback_may_take_longer_than_connections_take_to_open(options: dict[str, Any]) -> None:
    """In one stage process 0 calls, of two the process of the first one."""
    manual = {"dp": 2, "pp": 2} if options else {"dp": 4}
    options = {"num_microbatches": 1, **options}
    found = results(run("slow_callback", devices=2, takes_s=33, manual=manual, options=options))
    assert [f["right"] for f in found] == [True, True] and [f["calls"] for f in found] == [2, 0]


STAGES = {"manual": {"dp": 2, "pp": 2}, "num_stages": 2, "num_microbatches": 2}
#: The process whose callbacks raise, the kind of callback, and the plan. Of one stage process 0 calls.
FAILING: list[tuple[int, str, dict[str, Any]]] = [
    (0, "pure", {"manual": {"dp": 4}}),
    (0, "debug", {"manual": {"dp": 4}}),
    (0, "pure", {**STAGES, "schedule": "1f1b"}),
    (1, "pure", {**STAGES, "schedule": "1f1b"}),
    (1, "pure", {**STAGES, "schedule": "2bw"}),
    (1, "pure", {**STAGES, "schedule": "1f1b", "pipeline": "one_program"}),
]


@pytest.mark.slow
def test_an_exception_of_a_callback_is_raised_in_all_processes() -> None:
    """The next step runs, from the state of the last."""
    cases = [{"victim": victim, "kind": kind, "options": options} for victim, kind, options in FAILING]
    worlds = results(run("failing_callbacks", devices=2, cases=cases))
    for (victim, kind, options), *found in zip(FAILING, *worlds, strict=True):
        losses = [loss for before, _, after in found for loss in (before, after)]
        assert len(set(losses)) == 1 and math.isfinite(losses[0]), (options, found)
        for process, (_, error, _) in enumerate(found):
            if process == victim:
                assert error == ["JaxRuntimeError", "ValueError", "INTERNAL: a callback raised ValueError: ", None]
            else:
                text = f"a callback of the step raised ValueError: mine of {kind} in process {victim}"
                assert error == ["CallbackError", "NoneType", text, victim], options


@pytest.mark.slow
def test_a_plan_for_512_hosts_needs_no_other_process() -> None:
    (alone,) = results(run("far", 1))
    assert alone[0] == 4096
    assert results(run("far", 2)) == [0, alone]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("example", ["mlp", "gpt", "llama", "moe", "wide_resnet"])
def test_examples_equal_one_device(example: str, processes: int) -> None:
    meshes = [[8], [2, 4], [4, 2]]
    cases = [{"mesh_shape": mesh} for mesh in meshes]
    worlds = results(run("train", processes, devices=8 // processes, example=example, cases=cases, limit_s=580))
    assert all(found == worlds[0] for found in worlds)
    assert [case["mesh"] for case in worlds[0]] == meshes
    assert max(case["worst"] for case in worlds[0]) < 1e-10


@pytest.mark.slow
def test_scattered_sums_are_whole() -> None:
    """Gloo's own reduce-scatter is wrong in some of these calls."""
    assert results(run("scatters", calls=100, elements=[8192, 16384, 24576])) == [{"planned": 0, "written": 0}] * 2


def drawn(seed: int) -> tuple[int, dict[str, object]]:
    """An example in three to eight processes, with a mesh, a batch and sizes that no other test has."""
    draw = random.Random(seed)
    processes, meshes = draw.choice([(3, [[6], [2, 3], [3, 2]]), (4, [[4], [2, 2]]), (8, [[8], [2, 2, 2]])])
    batch = 24 * draw.choice([1, 2])
    sizes = {"layers": draw.choice([3, 5]), "hidden": draw.choice([12, 24]), "batch": batch}
    if processes == 4:
        sizes = {"layers": draw.choice([1, 2]), "vocab": 96, "seq": 24, "batch": batch}
    cases = [{"mesh_shape": mesh, "num_microbatches": draw.choice([1, 2])} for mesh in meshes]
    return processes, {"example": "gpt" if processes == 4 else "mlp", "sizes": sizes, "cases": cases}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 5, 7])
def test_drawn_examples_equal_one_device(seed: int) -> None:
    processes, options = drawn(seed)
    cases: Any = options["cases"]
    per = math.prod(cases[0]["mesh_shape"]) // processes
    worlds = results(run("train", processes, devices=per, limit_s=580, **options))
    assert all(found == worlds[0] for found in worlds)
    for asked, case in zip(cases, worlds[0], strict=True):
        assert case["mesh"] == asked["mesh_shape"] and case["worst"] < 1e-10, asked


@pytest.mark.slow
def test_a_plan_from_the_cache_of_process_0_is_every_processs(tmp_path: Path) -> None:
    cases = [{"mesh_shape": [2, 4]}]
    options = {"example": "gpt", "cases": cases, "environment": {"AUTOPAR_CACHE_DIR": str(tmp_path)}, "limit_s": 280}
    first = results(run("train", **options))
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = results(run("train", **options))
    assert first == again and first[0] == first[1] and kept
    assert kept == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}  # none was made again
