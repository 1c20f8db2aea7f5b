"""Does a compiled program stay within the memory limit that it was planned for?

The footprint of a program on a device is arguments + outputs + temporaries - aliases of XLA's memory analysis,
with the state donated. Each model is planned without a limit, then with falling fractions of the footprint that
this gave, until nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import autopar
from autopar import Cluster
from autopar.errors import InfeasiblePlanError
from benchmarks.clusters import bytes_cluster
from benchmarks.report import Report, Row, Say
from examples import gpt, mlp, moe, wide_resnet

TARGET = 1.10
FRACTIONS = (1.0, 0.85, 0.75, 0.65, 0.5, 0.25, 0.125)
QUICK_FRACTIONS = (0.75, 0.25)


@dataclass(frozen=True)
class Model:
    """A model: name, module of examples, preset and overrides."""

    name: str
    module: Any
    preset: str = "small"
    overrides: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[Any, Any]:
        """The train step and the shapes of its arguments."""
        step, args = self.module.build(self.preset, abstract=True, **self.overrides)
        return step, args


MODELS = (
    Model("mlp, large batch", mlp, "small", {"batch": 2048, "optimizer": "adam"}),
    Model("mlp, large weights", mlp, "small", {"hidden": 512, "batch": 64, "optimizer": "adam"}),
    Model("gpt", gpt, "small", {"layers": 2}),
    Model("moe", moe, "small", {"layers": 2}),
    Model("wide_resnet", wide_resnet, "small", {"stages": (1, 1)}),
)
QUICK = (Model("mlp, tiny", mlp, "tiny", {"batch": 64}),)


def measure(model: Model, cluster: Cluster, fractions: Sequence[float] = FRACTIONS) -> Iterator[Row]:
    """Rows of a model: without a limit, then with each limit until nothing fits."""
    step, args = model.build()
    free: int | None = None
    for fraction in (None, *fractions):
        limit = None if fraction is None or free is None else int(fraction * free)
        function = autopar.parallelize(step, cluster=cluster, memory_limit=limit, donate_argnums=0)
        row: dict[str, Any] = {"model": model.name, "limit": "none" if fraction is None else f"{fraction:g}"}
        try:
            compiled = function.compile(*args)
        except InfeasiblePlanError as error:
            yield {**row, "limit_bytes": limit, "least_bytes": error.least_bytes, "mesh": "infeasible"}
            return
        plan = compiled.plan
        used = compiled.local.footprint_bytes
        free = used if free is None else free
        yield {
            **row,
            "limit_bytes": limit,
            "mesh": "x".join(str(n) for n in plan.stages[0].mesh_shape.values()),
            "stages": plan.num_stages,
            "microbatches": plan.num_microbatches,
            "recomputed": plan.stages[0].form.remat,
            "predicted_bytes": plan.peak_memory,
            "compiled_bytes": used,
            "compiled/predicted": used / plan.peak_memory,
            "compiled/limit": None if limit is None else used / limit,
            "step_s": plan.step_time,
            "planning_s": plan.search.seconds,
        }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one tiny model."""
    rows: list[Row] = []
    for model in QUICK if quick else MODELS:
        say(f"memory limit: {model.name}")
        for row in measure(model, bytes_cluster(), QUICK_FRACTIONS if quick else FRACTIONS):
            say(str(row))
            rows.append(row)
    ratios = [row["compiled/limit"] for row in rows if row.get("compiled/limit") is not None]
    return Report(
        "memory_limit",
        f"compiled arguments + temporaries at most {TARGET:.2f} of the limit",
        tuple(rows),
        bool(ratios) and max(ratios) <= TARGET,
        (f"largest compiled/limit: {max(ratios, default=0):.3f} over {len(ratios)} feasible limits",),
        measured=("planning_s",),
    )
