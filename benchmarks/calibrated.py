"""Predicted step times of the examples on one CPU device, after calibrating it here and now, next to measured ones.

Steps and calibration are timed in the same rounds, each a median, as the machine may be shared.
"""

from __future__ import annotations

import statistics
import time
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import autopar
from autopar.api.calibrate import calibrate
from autopar.cluster import Cluster
from autopar.cluster.file import parse
from autopar.runtime.measuring import QUICK, Effort
from benchmarks.report import Report, Row, Say
from examples import gpt, llama, mlp, moe, wide_resnet

TOLERANCE = 0.20
#: Of every example in each round.
STEPS = 2
EXAMPLES: Mapping[str, tuple[Any, str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mlp": (mlp, "small", {"hidden": 1024, "batch": 256}),
        "gpt": (gpt, "small", {}),
        "llama": (llama, "small", {}),
        "moe": (moe, "small", {}),
        "wide_resnet": (wide_resnet, "small", {}),
    }
)


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes the perceptron and a rough calibration."""
    device = jax.devices("cpu")[:1]
    effort = QUICK if quick else Effort()
    names = ("mlp",) if quick else tuple(EXAMPLES)
    ready = {}
    for name in names:
        say(f"calibrated: compiling {name}")
        module, preset, sizes = EXAMPLES[name]
        step, args = module.build("tiny" if quick else preset, **({} if quick else sizes))
        placed = jax.device_put(args, device[0])
        compiled = jax.jit(step).lower(*placed).compile()
        jax.block_until_ready(compiled(*placed))
        ready[name] = (step, placed, compiled)
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def round_begins(text: str) -> None:
        say(f"calibrated: {text}")
        for name, (_, placed, compiled) in [*ready.items()] * STEPS:
            start = time.perf_counter()
            jax.block_until_ready(compiled(*placed))
            seconds[name].append(time.perf_counter() - start)

    found = calibrate("calibrated", devices=device, effort=effort, progress=round_begins)
    cluster = cluster_of(found.text)
    rows: list[Row] = []
    for name, (step, placed, _) in ready.items():
        plan = autopar.parallelize(step, cluster=cluster).plan(*placed)
        measured = statistics.median(seconds[name])
        low, _, high = (float(q) for q in np.quantile(seconds[name], (0.25, 0.5, 0.75)))
        rows.append(
            {
                "example": name,
                "predicted_s": plan.step_time,
                "measured_s": measured,
                "predicted/measured": plan.step_time / measured,
                "spread": (high - low) / measured,
            }
        )
    within = all(abs(r["predicted/measured"] - 1) <= TOLERANCE for r in rows)
    return Report(
        "calibrated",
        f"predicted step time of every example on one device within {TOLERANCE:.0%} of the measured one",
        tuple(rows),
        within,
        notes=tuple(found.text.splitlines()),
        measured=("measured_s",),
    )


def cluster_of(text: str) -> Cluster:
    """The cluster of a file's text."""
    return Cluster(*parse(tomllib.loads(text), "calibrated.toml"))
