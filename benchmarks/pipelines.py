"""What a pipeline's runtime costs: a step by the instruction lists next to the calls of its programs alone.

    step       all instructions of all workers, results joined; arguments lie where they are wanted, as in a loop
    programs   the compiled programs of the same step, called in the same order with the arrays that the step gave them

Both run in turns in one process, where programs of different stages do not overlap on a CPU; so the ratio is what
sends, accumulation and bookkeeping cost, and the difference over the number of instructions the cost of one.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.report import Report, Row, Say
from examples import gpt, mlp


@dataclass(frozen=True)
class Model:
    """A model: name, module of examples, preset, overrides, stages and microbatches."""

    name: str
    module: Any
    preset: str
    stages: int
    microbatches: int
    overrides: dict[str, Any] = field(default_factory=dict)


MODELS = (
    Model("mlp, compute dominates", mlp, "small", 2, 8, {"layers": 4, "hidden": 1024, "batch": 1024}),
    Model("gpt, tiny", gpt, "tiny", 2, 8, {"batch": 8}),
)
QUICK = (Model("mlp, tiny", mlp, "tiny", 2, 2),)


def measure(model: Model, rounds: int) -> Row:
    """The row of a model."""
    fn, args = model.module.build(model.preset, **model.overrides)
    function = autopar.parallelize(
        fn, num_stages=model.stages, num_microbatches=model.microbatches, schedule="1f1b", mesh_shape=None
    )
    program = function.compile(*args).local
    leaves = jax.tree.leaves(args)
    calls = _calls(program, leaves)
    steps_s, alone_s = [], []
    for _ in range(rounds):
        placed = jax.block_until_ready(program.place_all(leaves))
        began_s = time.perf_counter()
        jax.block_until_ready(program.run(placed, leaves))
        steps_s.append(time.perf_counter() - began_s)
        fresh = [(compiled, number, _copies(arrays)) for compiled, number, arrays in calls]
        began_s = time.perf_counter()
        jax.block_until_ready([compiled(number, *arrays) for compiled, number, arrays in fresh])
        alone_s.append(time.perf_counter() - began_s)
    instructions = sum(len(w.instructions) for w in program.lowered.instructions.workers)
    step_s, programs_s = statistics.median(steps_s), statistics.median(alone_s)
    return {
        "model": model.name,
        "instructions": instructions,
        "programs run": len(calls),
        "step_s": step_s,
        "programs_s": programs_s,
        "step/programs": statistics.median(a / b for a, b in zip(steps_s, alone_s, strict=True)),
        "instruction_s": (step_s - programs_s) / instructions,
    }


def _calls(program: Any, leaves: list[Any]) -> list[tuple[Any, Any, list[Any]]]:
    """Every call of a compiled program in one step, with its arrays."""
    calls: list[tuple[Any, Any, list[Any]]] = []

    def recording(compiled: Any) -> Any:
        def call(number: Any, *arrays: Any) -> Any:
            calls.append((compiled, number, _copies(arrays)))
            return compiled(number, *arrays)

        return call

    loaded = {
        key: found if found.compiled is None else dataclasses.replace(found, compiled=recording(found.compiled))
        for key, found in program.loaded.items()
    }
    watched = dataclasses.replace(program, loaded=loaded)
    jax.block_until_ready(watched.run(watched.place_all(leaves), leaves))
    return calls


def _copies(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that a program may write its results into without ending those that it is called with next."""
    copies = [jnp.copy(a) for a in arrays]
    jax.block_until_ready(copies)
    return copies


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one tiny model."""
    rows = []
    for model in QUICK if quick else MODELS:
        say(f"pipelines: {model.name}")
        rows.append(measure(model, 3 if quick else 30))
    return Report(
        "pipelines",
        "where computing dominates a step takes at most 1.15 times its programs",
        tuple(rows),
        quick or rows[0]["step/programs"] <= 1.15,
        measured=("step_s", "programs_s", "instruction_s"),
    )
