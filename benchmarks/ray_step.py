"""What a step on Ray workers costs beyond its computation.

    tiny     a pipeline so small that computing takes no time: two stages, eight microbatches, 1F1B
    fixed    pipelines whose stages add a number, in 2 and in 16 microbatches, and the same in one process: what a step
             costs, and what each microbatch adds
    large    one whose programs take nearly all of the time, and the ideal: the same schedule with the times that the
             programs took on the workers, and with sends, instructions and the driver for nothing

State goes from step to step as handles, and the loss comes with each step. Of the large one steps with and without
times run in turns, so that both see the same load of the machine; the ideal is that of the step just before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.schedule import Table, Task
from autopar.simulate import Timeline
from benchmarks.report import Report, Row, Say
from examples import mlp

TARGET_S, TARGET_RATIO = 0.025, 1.15
#: Of stages that compute nothing: seconds of a step, and of each microbatch.
FIXED_S, MICROBATCH_S = 0.005, 0.0008
FEW, MANY = 2, 16
MICROBATCHES = 8
#: Overrides of the large model.
LARGE = {"layers": 4, "hidden": 1024, "batch": 1024}


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes few steps of small models and holds them to no target."""
    with autopar.Cluster.ray(workers=2, devices_per_worker=1) as cluster:
        say("ray_step: two workers, tiny")
        tiny = _tiny(cluster, 5 if quick else 200)
        say("ray_step: two workers, stages that compute nothing")
        fixed = _fixed(cluster, 5 if quick else 300)
        say("ray_step: two workers, large")
        large = _large(cluster, {"layers": 4, "hidden": 16, "batch": 16} if quick else LARGE, 3 if quick else 30)
    return Report(
        "ray_step",
        f"a step of no size on two Ray workers takes less than {TARGET_S * 1e3:.0f} ms, and one of some size at most "
        f"{TARGET_RATIO} times the ideal; one of stages that compute nothing {FIXED_S * 1e3:.0f} ms and "
        f"{MICROBATCH_S * 1e3:.1f} ms a microbatch",
        (tiny, fixed, large),
        quick
        or (
            tiny["median_s"] < TARGET_S
            and large["step/ideal"] <= TARGET_RATIO
            and fixed["fixed_s"] <= FIXED_S
            and fixed["microbatch_s"] <= MICROBATCH_S
        ),
        measured=("median_s", "tenth_s", "ninetieth_s", "fixed_s", "microbatch_s", "timed_s"),
    )


def _fixed(cluster: Any, rounds: int) -> Row:
    """The row of stages that compute nothing: lines through the medians of steps with few and many microbatches."""
    few_s, many_s = trivial_times(cluster, rounds)
    # The same in one process, which has as many devices as the workers have together.
    command = [sys.executable, "-c", f"from benchmarks.ray_step import print_times; print_times({rounds})"]
    here = subprocess.run(
        command,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    few_here_s, many_here_s = map(float, here.stdout.split()[-2:])
    each_s, each_here_s = (many_s - few_s) / (MANY - FEW), (many_here_s - few_here_s) / (MANY - FEW)
    return {
        "model": "adds a number",
        "stages": 2,
        "microbatches": f"{FEW}, {MANY}",
        "steps": rounds,
        "median_s": few_s,
        "fixed_s": few_s - FEW * each_s,
        "microbatch_s": each_s,
        "fixed_here_s": few_here_s - FEW * each_here_s,
        "microbatch_here_s": each_here_s,
    }


def trivial_times(cluster: Any, rounds: int) -> tuple[float, float]:
    """Median seconds of a step in few and in many microbatches, run in turns.

    Args:
        cluster: of two workers; None for the devices of this process.
        rounds: number of steps of each.
    """
    weights, batch = [jnp.ones(())] * 2, jnp.ones((MANY, 1))
    runs = [
        autopar.parallelize(
            _trivial_step, cluster=cluster, num_stages=2, num_microbatches=count, schedule="1f1b"
        ).compile(weights, batch)
        for count in (FEW, MANY)
    ]  # fmt: skip
    states: list[Any] = [weights] * len(runs)
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 5):
        for n, run in enumerate(runs):
            began_s = time.perf_counter()
            states[n], loss = run(states[n], batch)
            float(loss)
            if number >= 5:
                taken[n].append(time.perf_counter() - began_s)
    few_s, many_s = (statistics.median(t) for t in taken)
    return few_s, many_s


def print_times(rounds: int) -> None:
    """Prints `trivial_times` of this process."""
    print(*trivial_times(None, rounds))


def _trivial_step(weights: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((batch * w[0]) * w[1])

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def _tiny(cluster: Any, rounds: int) -> Row:
    """The row of the tiny model."""
    step, (state, batch) = mlp.build("tiny", layers=8, batch=4 * MICROBATCHES)
    compiled = _function(step, cluster).compile(state, batch)
    taken = _times(compiled, state, batch, rounds)
    lists = compiled.local.runtime.source.program.workers
    compiled.local.close()
    deciles = statistics.quantiles(taken, n=10)
    return {
        "model": "tiny",
        "stages": 2,
        "microbatches": MICROBATCHES,
        "instructions": sum(len(w.instructions) for w in lists),
        "steps": rounds,
        "median_s": statistics.median(taken),
        "tenth_s": deciles[0],
        "ninetieth_s": deciles[-1],
    }


def _large(cluster: Any, sizes: dict[str, Any], rounds: int) -> Row:
    """The row of the large model: medians over pairs of steps."""
    step, (state, batch) = mlp.build("tiny", **sizes)
    function = _function(step, cluster)
    compiled = function.compile(state, batch)
    local = compiled.local
    table = local.runtime.source.program.table
    state = function.shard(state, batch)[0]
    pairs = []
    for number in range(rounds + 2):
        timed_s, state = _step(compiled, state, batch, timed=True)
        timeline = local.timeline()
        plain_s, state = _step(compiled, state, batch, timed=False)
        if number >= 2:
            pairs.append((plain_s, ideal_s(timeline, table), timed_s, timeline.step_time))
    local.close()
    plain, ideal, timed, inside = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "model": ", ".join(f"{k} {v}" for k, v in sizes.items()),
        "stages": 2,
        "microbatches": MICROBATCHES,
        "steps": rounds,
        "median_s": plain,
        "ideal_s": ideal,
        "step/ideal": statistics.median(p / i for p, i, _, _ in pairs),
        "timed_s": timed,
        # Of the step with times: before its first program begins and after its last one ends.
        "outside_s": timed - inside,
        # Of the same: workers waiting for each other's values longer than the ideal has it.
        "between_s": inside - ideal,
    }


def ideal_s(timeline: Timeline, table: Table) -> float:
    """How long the schedule takes with the times of a timeline's programs, and everything else for nothing."""
    taken: dict[Task, float] = {}
    ends = []
    others = [0.0] * table.num_workers
    for worker in range(table.num_workers):
        for e in timeline.computing(worker):
            if e.kind in ("forward", "backward", "weight"):
                taken[Task(e.kind, e.stage, e.microbatch)] = e.end_s - e.start_s
            else:
                others[worker] += e.end_s - e.start_s
    over: dict[Task, float] = {}
    rows = [list(row) for row in table.rows]
    clocks = [0.0] * table.num_workers
    while any(rows):
        for worker, row in enumerate(rows):
            while row and all(t in over for t in table.needs(row[0])):
                task = row.pop(0)
                begins = max([clocks[worker], *(over[t] for t in table.needs(task))])
                over[task] = clocks[worker] = begins + taken[task]
    for worker, clock in enumerate(clocks):
        ends.append(clock + others[worker])
    return max(ends)


def _function(step: Any, cluster: Any) -> Any:
    return autopar.parallelize(step, cluster=cluster, num_stages=2, num_microbatches=MICROBATCHES, schedule="1f1b")


def _step(compiled: Any, state: Any, batch: Any, timed: bool) -> tuple[float, Any]:
    """Seconds of a step, and the next state."""
    leaves = jax.tree.leaves((state, batch))
    began_s = time.perf_counter()
    results = compiled.local.run(compiled.local.place_all(leaves), leaves, timed=timed)
    state, metrics = compiled.traced.results(results)
    float(metrics["loss"])
    return time.perf_counter() - began_s, state


def _times(step: Any, state: Any, batch: Any, rounds: int) -> list[float]:
    found = []
    for number in range(rounds + 5):
        began_s = time.perf_counter()
        state, metrics = step(state, batch)
        float(metrics["loss"])
        if number >= 5:
            found.append(time.perf_counter() - began_s)
    return found
