"""Pipelines without Ray: a plan with stages is one XLA program on the devices of all processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.hosts.one_program import load_world
from examples import mlp
from tests.runtime_hosts.launch import results, run


def both(build: Any, schedule: str, stages: int, devices: int, **options: Any) -> tuple[Any, Any, Any]:
    """A step of the pipeline of this process, the same as one program, and that program."""
    fn, args = build(dtype="float64")
    args = jax.tree.map(np.asarray, args)
    step = autopar.parallelize(
        fn, num_stages=stages, num_microbatches=4, schedule=schedule, mesh_shape=(devices,), **options
    )
    compiled = step.compile(*args)
    local, leaves = compiled.local, jax.tree.leaves(args)
    want = local.run(local.place_all(leaves), leaves)
    one = load_world(compiled.traced, local.split_step, local.lowered, jax.devices(), local.donated)
    got = one.run(one.place_all(leaves), leaves)
    return got, want, one


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zb_h1", 2)])
def test_one_program_equals_the_pipeline_of_one_process(x64: None, schedule: str, stages: int) -> None:
    got, want, one = both(mlp.build, schedule, stages, 8 // stages)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    # State lies on its stage's devices alone; what is no state lies on all.
    sizes = {len(a.sharding.device_set) for a in got}
    assert sizes == {8, 8 // stages}
    # A device has the slots of its worker: no more than the longest of any worker.
    arguments = one.executable.memory_analysis().argument_size_in_bytes
    assert arguments == sum(s.dtype.itemsize * s.size for s in one.slots) // 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "workers"),
    [("gpipe", 2, 2), ("interleaved", 2, 2), ("1f1b", 4, 4), ("zb_h2", 4, 4), ("zb-v", 4, 2), ("eager-1f1b", 4, 4)],
)
def test_more_schedules(x64: None, schedule: str, stages: int, workers: int) -> None:
    got, want, _ = both(mlp.build, schedule, stages, 8 // workers)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_all_ways_of_calling_a_pipeline_in_two_processes(tmp_path: Path) -> None:
    first, second = results(run("pipelines", path=str(tmp_path / "run")))
    assert first.pop("here") and second.pop("here")
    assert first.pop("verified") == [True, True] and not second.pop("verified")
    assert first == second
    assert first["stages"] == 2 and first["apart"] < 1e-12 and first["measured"] == 2
    assert first["restored"] and first["one stage"] and first["parts"]
    assert first["given plan"]
    assert first["simulated"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_are_the_planners_choice_where_nodes_are_joined_slowly() -> None:
    """In two processes; accelerators are those of the plan, what runs it are CPUs."""
    first, second = results(run("slow_network", limit_s=280))
    assert first == second
    assert first["slow"]["stages"] > 1 and first["CPUs"] == 1
    assert first["slow"]["close"] and first["fast"]["close"]


#: By example (stages, workers, schedule).
CASES = {
    "mlp": [
        (2, 2, "1f1b"),
        (4, 2, "interleaved"),
        (2, 2, "zb_h1"),
        (4, 4, "1f1b"),
        (8, 4, "interleaved"),
        (4, 4, "zb_h1"),
    ],
    "gpt": [(2, 2, "1f1b"), (4, 4, "zb_h1")],
    "llama": [(2, 2, "1f1b")],
    "moe": [(2, 2, "zb_h1")],
    "wide_resnet": [(2, 2, "1f1b")],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("example", sorted(CASES))
def test_pipelines_in_several_processes_equal_one_device(example: str, processes: int) -> None:
    """Four workers on two processes are two on each; two workers on four processes are one on two each."""
    cases = [
        {"num_stages": stages, "num_microbatches": 4, "schedule": schedule, "mesh_shape": [8 // workers]}
        for stages, workers, schedule in CASES[example]
    ]
    sizes = {"layers": 8} if example == "mlp" else {}
    options = {"example": example, "cases": cases, "sizes": sizes}
    worlds = results(run("train", processes, devices=8 // processes, limit_s=880, **options))
    assert all(found == worlds[0] for found in worlds)
    for (stages, workers, schedule), case in zip(CASES[example], worlds[0], strict=True):
        assert case["worst"] < 1e-10, (stages, schedule)
        assert case["stages"] == stages and case["mesh"] == [8 // workers]
        # Of llama one array holds the layers of all stages.
        assert max(case["processes"]) == (processes if example == "llama" else max(1, processes // workers))


def drawn(seed: int, count: int = 3) -> list[dict[str, Any]]:
    """Pipelines with a schedule, stages, microbatches and meshes by chance, on eight devices."""
    draw, cases = random.Random(seed), []
    for _ in range(count):
        workers, schedule = draw.choice([2, 4]), draw.choice(["gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved"])
        mesh = draw.choice([[4], [2, 2]] if workers == 2 else [[2]])
        stages = workers * (2 if schedule == "interleaved" else 1)
        count_of = draw.choice([4, 8])
        cases.append({"num_stages": stages, "num_microbatches": count_of, "schedule": schedule, "mesh_shape": mesh})
    return cases


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "processes"), [(0, 2), (1, 2), (2, 4)])
def test_drawn_pipelines_equal_one_device(seed: int, processes: int) -> None:
    cases = drawn(seed)
    sizes = {"layers": 8, "hidden": random.Random(seed).choice([16, 24]), "batch": 32}
    options = {"example": "mlp", "cases": cases, "sizes": sizes}
    worlds = results(run("train", processes, devices=8 // processes, limit_s=580, **options))
    assert all(found == worlds[0] for found in worlds)
    for asked, case in zip(cases, worlds[0], strict=True):
        assert case["worst"] < 1e-10, asked
        assert case["stages"] == asked["num_stages"] and case["mesh"] == asked["mesh_shape"], asked
