"""One script in several processes: the values of one device, one plan, errors of processes that differ."""

from __future__ import annotations

from pathlib import Path

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
    assert first["pieces"] <= 0.5, first["specs"]
    assert {k: v for k, v in first.items() if k != "digest"} == {k: v for k, v in second.items() if k != "digest"}
    assert first["digest"] == second["digest"]


def test_processes_that_differ_get_one_typed_error_each() -> None:
    first, second = results(run("wrong_use", environment={"AUTOPAR_WAIT_S": "4"}))
    for name in ("program", "shape", "option", "version", "values", "init"):
        assert first[name][0] == "ProcessMismatchError", (name, first[name])
        assert first[name] == second[name]
        assert "process 1 differs from process 0" in first[name][1]
    assert "sin" in first["program"][1] and "tanh" in first["program"][1] and "programs.py" in first["program"][1]
    assert "f64[8,64]" in first["shape"][1] and "f64[16,64]" in first["shape"][1]
    assert "option num_microbatches is 2 there and 1 on process 0" in first["option"][1]
    assert "version of autopar is 7.7" in first["version"][1]
    assert "argument x" in first["values"][1] and "checksum" in first["values"][1]
    assert first["infeasible"][0] == second["infeasible"][0] == "InfeasiblePlanError"
    assert first["infeasible"][1] == second["infeasible"][1]
    assert first["fine"] == second["fine"] == ["", ""]
    assert first["missing"][0] == "ProcessLostError" and "process 1 of 2 did not come" in first["missing"][1]


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
