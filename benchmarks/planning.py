"""Seconds to plan a GPT of 12 unrolled layers for a 2x4 mesh, phase by phase, each model in a process of its own.

Nothing is compiled by XLA: "trace lowered" is jax's tracing of the lowered program to StableHLO, which is what
`jax.jit` does before the compiler runs.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar.api.pure import PureFunction
from autopar.frontend import Traced
from autopar.lower.program import LoweredProgram, lower
from autopar.plan.text import gap_of
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import gpt

TARGET_S = 10.0
DEVICES = 8


@dataclass(frozen=True)
class Model:
    """A GPT: its row's name, preset and layers."""

    name: str
    preset: str
    layers: int = 12


MODELS = (Model("gpt 125M width", "125M"), Model("gpt 6.7B width", "6.7B"))
QUICK = (Model("gpt tiny", "tiny", 1),)


def measure(model: Model) -> tuple[Row, tuple[Row, ...]]:
    """The row of a model and its rows by phase; this process has 8 devices."""
    jax.devices()  # their start is not counted
    step, args = gpt.build(model.preset, abstract=True, layers=model.layers)
    cluster = autopar.Cluster.load("dgx-a100", nodes=1)
    options = autopar.parallelize(step, cluster=cluster, mesh_shape=(2, 4), donate_argnums=0).options
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    pure = PureFunction(step, options)
    timed: list[Row] = []

    def phase(name: str, run: Callable[[], Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = run()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        timed.append({"model": model.name, "phase": name, "wall_s": wall_s, "cpu_s": cpu_s})
        return result

    signature, _ = phase("trace", lambda: pure.resolve(args, {}))
    traced, plan = phase("plan", lambda: pure.plan(signature))
    inside = [
        {"model": model.name, "phase": f"  of it {name}", "wall_s": s, "cpu_s": None}
        for name, s in plan.phases
        if name != "trace"
    ]
    program = phase("lower", lambda: lower(traced, plan, jax.devices()))
    total_s, total_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    phase("trace lowered", lambda: program.function.lower(*shapes(traced, program)))
    scale = 1 if sys.platform == "darwin" else 1024
    row = {
        "model": model.name,
        "layers": model.layers,
        "operators": len(traced.graph.operators),
        "wall_s": total_s,
        "cpu_s": total_cpu_s,
        "with trace lowered, wall_s": total_s + timed[-1]["wall_s"],
        "with trace lowered, cpu_s": total_cpu_s + timed[-1]["cpu_s"],
        "objective_s": plan.search.objective,
        "gap": gap_of(plan.content.search.sharding_bound or plan.search.lower_bound, plan.step_time),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
    }
    return row, (*timed[:2], *inside, *timed[2:])


def measure_in_new_process(model: Model) -> tuple[Row, tuple[Row, ...]]:
    """`measure` with virtual devices, in a process that has not used jax yet."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return measure(model)


def shapes(traced: Traced, program: LoweredProgram) -> list[Any]:
    """Arguments of a lowered program, as shapes."""
    avals = [*traced.signature.avals(), *(jax.typeof(c) for c in traced.closed_over)]
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, program.input_shardings, strict=True)
    ]


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes a tiny model."""
    rows: list[Row] = []
    details: list[Row] = []
    for model in QUICK if quick else MODELS:
        say(f"planning: {model.name}")
        row, more = in_new_process(measure_in_new_process, model)
        rows.append(row)
        details.extend(more)
    return Report(
        "planning",
        f"planning takes less than {TARGET_S:.0f} s",
        tuple(rows),
        all(row["wall_s"] < TARGET_S for row in rows),
        ("wall_s and cpu_s: trace, plan and lower, in one process",),
        details=(("planning by phase", tuple(details)),),
        measured=("wall_s", "cpu_s", "with trace lowered, wall_s", "with trace lowered, cpu_s"),
    )
