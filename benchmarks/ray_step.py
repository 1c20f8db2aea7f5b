"""What a step on Ray workers costs beyond its computation: a pipeline so small that computing takes no time.

Two stages, eight microbatches, 1F1B; the state goes from step to step as handles, and the loss comes with each step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import autopar
from benchmarks.report import Report, Row, Say
from examples import mlp

TARGET_S = 0.025
MICROBATCHES = 8


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes few steps and holds them to no target."""
    rounds = 5 if quick else 200
    step, (state, batch) = mlp.build("tiny", layers=8, batch=4 * MICROBATCHES)
    with autopar.Cluster.ray(workers=2, devices_per_worker=1) as cluster:
        say("ray_step: two workers")
        function = autopar.parallelize(
            step, cluster=cluster, num_stages=2, num_microbatches=MICROBATCHES, schedule="1f1b"
        )
        compiled = function.compile(state, batch)
        taken = _times(compiled, state, batch, rounds)
        lists = compiled.local.runtime.source.program.workers
    deciles = statistics.quantiles(taken, n=10)
    row: Row = {
        "stages": 2,
        "microbatches": MICROBATCHES,
        "instructions": sum(len(w.instructions) for w in lists),
        "steps": rounds,
        "median_s": statistics.median(taken),
        "tenth_s": deciles[0],
        "ninetieth_s": deciles[-1],
    }
    return Report(
        "ray_step",
        f"a step of no size on two Ray workers takes less than {TARGET_S * 1e3:.0f} ms",
        (row,),
        quick or row["median_s"] < TARGET_S,
    )


def _times(step: Any, state: Any, batch: Any, rounds: int) -> list[float]:
    found = []
    for number in range(rounds + 5):
        began_s = time.perf_counter()
        state, metrics = step(state, batch)
        float(metrics["loss"])
        if number >= 5:
            found.append(time.perf_counter() - began_s)
    return found
