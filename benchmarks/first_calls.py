"""CPU seconds in which a small model is planned, next to those in which XLA compiles its step under `jax.jit`.

Examples of fewer than 2,000 operators, each in a process of its own, planned for the eight devices of this process with
every option left out. CPU seconds, which other work on the machine does not change much. The modules of autopar are
loaded before, as jax's are, and the seconds of that are a column of their own: it happens once in a process.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

import jax

import autopar
from benchmarks.clusters import DEVICES
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say

TARGET = 1.0


@dataclass(frozen=True)
class Model:
    """An example: its module, preset and overrides."""

    module: str
    preset: str = "tiny"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its row."""
        more = [f"{k} {v}" for k, v in self.overrides.items()]
        return ", ".join([self.module, self.preset, *more])


MODELS = (
    Model("mlp"),
    Model("mlp", "small"),
    Model("gpt"),
    Model("gpt", "tiny", {"layers": 4}),
    Model("llama"),
    Model("moe"),
    Model("wide_resnet"),
)
QUICK = (Model("mlp"),)


def measure(model: Model) -> Row:
    """The row of a model; this process has eight devices."""
    jax.devices()  # their start is not counted
    before_s = time.process_time()
    planner = autopar.parallelize  # loads what it is made of
    loaded_s = time.process_time()
    step, args = importlib.import_module(f"examples.{model.module}").build(model.preset, **model.overrides)
    began_s = time.process_time()
    traced = jax.jit(step).trace(*args)
    lowered = traced.lower()
    traced_s = time.process_time()
    lowered.compile()
    compiled_s = time.process_time()
    plan = planner(step).plan(*args)
    planned_s = time.process_time()
    return {
        "model": model.name,
        "equations": len(traced.jaxpr.eqns),
        "stages": plan.num_stages,
        "load_s": loaded_s - before_s,
        "trace_s": traced_s - began_s,
        "xla_s": compiled_s - traced_s,
        "plan_s": planned_s - compiled_s,
        "plan/xla": (planned_s - compiled_s) / (compiled_s - traced_s),
    }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes the smallest model in this process and holds it to no target."""
    if quick:
        return _report([measure(m) for m in QUICK], True)
    rows = []
    for model in MODELS:
        say(f"first_calls: {model.name}")
        rows.append(in_new_process(_with_devices, model))
    return _report(rows, False)


def _with_devices(model: Model) -> Row:
    """`measure` in a new process."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return measure(model)


def _report(rows: list[Row], quick: bool) -> Report:
    return Report(
        "first_calls",
        f"a plan takes at most {TARGET:.0f} of the CPU time in which XLA compiles the step",
        tuple(rows),
        quick or all(row["plan/xla"] <= TARGET for row in rows),
        measured=("load_s", "trace_s", "xla_s", "plan_s"),
    )
