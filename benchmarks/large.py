"""Seconds and memory from function to plan for the largest models, each in a process of its own; none is allocated."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

import autopar
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import gpt, llama

#: Most bytes that planning may take.
MEMORY_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Case:
    """A model, a cluster, and what is asked for.

    Args:
        name: of the row.
        build: of the example.
        preset: of the model.
        cluster: name of its file.
        nodes: of it.
        target_s: most seconds from function to plan; None where only growth is looked at.
        overrides: of the example's sizes.
        options: of `autopar.parallelize`.
    """

    name: str
    build: Callable[..., Any]
    preset: str
    cluster: str
    nodes: int
    target_s: float | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def _one_stage(**more: Any) -> Mapping[str, Any]:
    return {"num_stages": 1, "num_microbatches": 1, **more}


def stages(count: int, microbatches: int) -> Mapping[str, Any]:
    """Options of a pipeline."""
    return {"num_stages": count, "num_microbatches": microbatches}


#: Blocks in one loop, recomputed one by one.
SCANNED: Mapping[str, Any] = {"scan": True, "remat": True}

CASES = (
    Case("llama 8B, 8 devices", llama.build, "8B", "dgx-h100", 1, 10.0, {}, _one_stage()),
    Case("llama 8B, 8x8", llama.build, "8B", "dgx-h100", 8, 10.0, {"batch": 64}, _one_stage(mesh_shape=(8, 8))),
    Case("llama 70B, 32x8", llama.build, "70B", "dgx-h100", 32, 20.0, {"batch": 256}, _one_stage(mesh_shape=(32, 8))),
    Case("gpt 39B, 64 V100", gpt.build, "39B", "p3.16xlarge", 8, 10.0, {"batch": 1024, **SCANNED}, stages(8, 256)),
    Case("gpt 175B, 1024 A100", gpt.build, "175B", "dgx-a100", 128, 30.0, {"batch": 1536, **SCANNED}, stages(16, 192)),
    Case("gpt 1T, 3072 A100", gpt.build, "1T", "dgx-a100", 384, 60.0, {"batch": 3072, **SCANNED}, stages(64, 512)),
    Case("gpt 39B, all free", gpt.build, "39B", "p3.16xlarge", 8, 10.0, {"batch": 1024, **SCANNED}),
    Case("gpt 175B, all free", gpt.build, "175B", "dgx-a100", 128, 30.0, {"batch": 1536, **SCANNED}),
    Case("gpt 1T, all free", gpt.build, "1T", "dgx-a100", 384, 60.0, {"batch": 3072, **SCANNED}),
)
QUICK = (Case("gpt tiny", gpt.build, "tiny", "p3.16xlarge", 2, 60.0, {"layers": 2}, stages(2, 2)),)


def measure(case: Case) -> Row:
    """The row of a case; its process has done nothing else."""
    jax.config.update("jax_platforms", "cpu")
    step, args = case.build(case.preset, abstract=True, **case.overrides)
    cluster = autopar.Cluster.load(case.cluster, nodes=case.nodes)
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    row: dict[str, Any] = {"case": case.name}
    try:
        plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **case.options).plan(*args)
        row.update({f"{name}_s": seconds for name, seconds in plan.phases})
        row.update({"stages": plan.num_stages, "microbatches": plan.num_microbatches})
        row.update({"step_s": plan.step_time, "plan_peak_bytes": plan.peak_memory})
    except autopar.AutoparError as error:
        row["error"] = str(error).partition("\n")[0]
    row["wall_s"], row["cpu_s"] = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    # As if both processes were at their largest at the same time.
    row["peak_rss_bytes"] = sum(u.ru_maxrss for u in _usages()) * (1 if sys.platform == "darwin" else 1024)
    row["target_s"] = case.target_s
    return row


def _usages() -> tuple[resource.struct_rusage, ...]:
    """Of this process, and of the largest that it began and that has ended."""
    return resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)


def _cpu_s() -> float:
    return sum(u.ru_utime + u.ru_stime for u in _usages())


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes a tiny model."""
    rows: list[Row] = []
    for case in QUICK if quick else CASES:
        say(f"large: {case.name}")
        rows.append(in_new_process(measure, case))
    met = all(
        "error" not in r
        and r["peak_rss_bytes"] <= MEMORY_BYTES
        and (r["target_s"] is None or r["wall_s"] <= r["target_s"])
        for r in rows
    )
    return Report(
        "large",
        "each within its target_s and 4 GB",
        tuple(rows),
        met,
        ("wall_s and cpu_s: from function to plan, tracing included; cpu_s of both processes that plan",),
        measured=("wall_s", "cpu_s"),
    )
