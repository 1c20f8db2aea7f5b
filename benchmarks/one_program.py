"""A pipeline by four ways of running its instruction lists: seconds a step, bytes a device, seconds of compiling.

    lists                        walked in one process, a program for each piece of work
    one program                  one XLA program on all devices of one process
    two processes                walked by each of two processes, of its own stage
    two processes, one program   one XLA program on the devices of two processes
    ray                          walked by a worker for each stage, each in a process of its own

Every way is timed in processes that do nothing else, with two stages on two devices. ``python -m benchmarks.one_program
MODEL WAY`` is one of these processes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

import autopar
from autopar.runtime.hosts.one_program import load_world
from benchmarks.report import Report, Row, Say
from benchmarks.together import measured_together
from examples import gpt, mlp

WAYS = ("lists", "one program", "two processes", "two processes, one program", "ray")
#: By name: module, preset, overrides, microbatches, schedule, and steps that are timed.
MODELS: Mapping[str, tuple[Any, str, dict[str, Any], int, str, int]] = MappingProxyType(
    {
        "mlp, compute dominates": (mlp, "small", {"layers": 4, "hidden": 1024, "batch": 512}, 8, "1f1b", 20),
        "gpt, tiny": (gpt, "tiny", {}, 4, "1f1b", 20),
        "gpt, 4 layers of 256": (gpt, "small", {}, 4, "1f1b", 6),
        "mlp, tiny, interleaved": (mlp, "tiny", {"layers": 8}, 4, "interleaved", 20),
    }
)
QUICK = ("mlp, tiny, interleaved",)
_LIMIT_S = 500.0


def run(quick: bool, say: Say) -> Report:
    """The table; ``quick`` takes one tiny model and no Ray."""
    rows: list[Row] = []
    for model in QUICK if quick else MODELS:
        for way in WAYS[:3] if quick else WAYS:
            say(f"one_program: {model}, {way}")
            rows.append({"model": model, "run": way, **_started(model, way, 3 if quick else MODELS[model][-1])})
    losses = {m: {r["loss"] for r in rows if r["model"] == m} for m in {r["model"] for r in rows}}
    apart = max(max(found) - min(found) for found in losses.values())
    return Report(
        "one_program", "losses of all ways within 1e-4", tuple(rows), apart < 1e-4, measured=("step_s", "compile_s")
    )


def _started(model: str, way: str, rounds: int) -> Row:
    """What the processes of a way measured: that of the first."""
    count = 2 if way.startswith("two processes") else 1
    return measured_together(__name__, (model, way, str(rounds)), count, 2, _LIMIT_S)


def _measured(model: str, way: str, rounds: int) -> Row:
    """Times of steps of a model in this process."""
    module, preset, overrides, microbatches, schedule, _ = MODELS[model]
    fn, args = module.build(preset, **overrides)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": microbatches, "schedule": schedule}
    if way == "ray":
        with autopar.Cluster.ray(workers=2, devices_per_worker=1) as cluster:
            return _steps(autopar.parallelize(fn, cluster=cluster, **options), args, rounds)
    function = autopar.parallelize(fn, pipeline="one_program" if way.endswith(", one program") else "auto", **options)
    if way == "one program":
        return _steps(function, args, rounds, as_one=True)
    return _steps(function, args, rounds)


def _steps(function: Any, args: Any, rounds: int, as_one: bool = False) -> Row:
    compiled = function.compile(*args)
    compile_s = sum(s for name, s in compiled.plan.phases if name in ("lower", "compile"))
    if as_one:
        local = compiled.local
        began_s = time.perf_counter()
        one = load_world(compiled.traced, local.split_step, local.lowered, jax.devices(), local.donated)
        compile_s = time.perf_counter() - began_s
        compiled = dataclasses.replace(compiled, local=one)
    state, batch, taken = args[0], args[1], []
    metrics: Any = {}
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        state, metrics = compiled(state, batch)
        loss = float(metrics["loss"])
        taken.append(time.perf_counter() - began_s)
    return {
        "stages": compiled.plan.num_stages,
        "step_s": statistics.median(taken[1:]),
        "device_bytes": compiled.local.footprint_bytes,
        "compile_s": compile_s,
        "loss": loss,
    }


def main() -> None:
    """One process of one way: its row as JSON."""
    model, way, rounds = sys.argv[1:]
    if way != "ray":
        autopar.initialize()
    row = _measured(model, way, int(rounds))
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
