"""Work units against CPU seconds: the weights that fit best, and how far units err, on drawn problems.

Each problem is planned on one core by a process that has its compiled loops loaded, with nothing read from a cache
of plans. Units compare problems, and machines differ: `per_unit_s` is what one takes here, and an error is that of
units with it. `autopar.search.clock.WEIGHTS` has the weights; what is printed is what they would be here.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from scipy.optimize import nnls

import autopar
from autopar.search.clock import UNIT_S, WEIGHTS
from autopar.solver.meter import Work
from benchmarks.drawn import Case, CpuLimitError, cpu_limit, draw, plan_of
from benchmarks.fixed_plans import CASES
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say

SEED = 41
PROBLEMS = 30
#: CPU seconds after which a problem is left out.
LIMIT_S = 60.0
#: Relative error of units that counts as near.
NEAR = 0.25


def measure(cases: Sequence[Case]) -> list[Row]:
    """CPU seconds and counts of each case that has a plan, on one core."""
    jax.config.update("jax_platforms", "cpu")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # no second process: each piece is computed once
    for case in (c for c in CASES if c.name in ("one stage, gpt", "pipeline, limit, gpt")):
        case.plan()  # loads the compiled loops
    rows: list[Row] = []
    for case in cases:
        began_s = time.process_time()
        try:
            with cpu_limit(LIMIT_S):
                plan = plan_of(case)
        except (autopar.AutoparError, CpuLimitError):
            continue
        rows.append({"case": case.name, "cpu_s": time.process_time() - began_s, **dict(plan.search.work_by_kind)})
    return rows


def fitted(rows: Sequence[Row]) -> dict[Work, float]:
    """Units of one of each kind, none negative, that make the sum of squares of relative errors least."""
    kinds = list(Work)
    counts = np.array([[row.get(kind.value, 0) / WEIGHTS[kind] for kind in kinds] for row in rows])
    seconds = np.array([row["cpu_s"] for row in rows])
    weights, _ = nnls(counts / seconds[:, None], np.ones(len(rows)) / UNIT_S)
    return dict(zip(kinds, map(float, weights), strict=True))


def units_of(row: Row) -> int:
    """Units of a row of `measure`."""
    return sum(row.get(kind.value, 0) for kind in Work)


def per_unit_s(rows: Sequence[Row]) -> float:
    """CPU seconds of a unit on this machine: the middle between the least and the most of all rows, as a ratio."""
    each_s = [row["cpu_s"] / units_of(row) for row in rows]
    return math.sqrt(min(each_s) * max(each_s))


def with_errors(rows: Sequence[Row]) -> list[Row]:
    """Rows with units, the seconds that they stand for on this machine and the relative error."""
    unit_s = per_unit_s(rows) if rows else UNIT_S
    some = []
    for row in rows:
        units = units_of(row)
        counted = {kind.value: row.get(kind.value, 0) * unit_s for kind in Work}
        head = {"case": row["case"], "cpu_s": row["cpu_s"], "units": units, "units_s": units * unit_s}
        some.append({**head, "error": units * unit_s / row["cpu_s"] - 1, **counted})
    return some


def run(quick: bool, say: Say) -> Report:
    """The report."""
    cases = [draw(SEED, number) for number in range(2 if quick else PROBLEMS)]
    cases = [replace(case, asked=()) for case in cases]
    say(f"planning {len(cases)} problems of seed {SEED}")
    rows = in_new_process(measure, cases)
    shown = with_errors(rows)
    errors = [abs(row["error"]) for row in shown]
    near = sum(error <= NEAR for error in errors)
    said = "no problem has a plan"
    if errors:
        said = (
            f"{len(rows)} problems with a plan within {LIMIT_S:g} CPU s, {per_unit_s(rows) * 1e9:.1f} ns a unit; "
            f"units of {near} err by at most {NEAR:.0%}, median error {statistics.median(errors):.0%}, "
            f"worst {max(errors):.0%}"
        )
    weights = "weights that fit best here: " + ", ".join(f"{kind.name} {w:.3g}" for kind, w in fitted(rows).items())
    return Report(
        "work units against CPU seconds",
        "",
        tuple(shown),
        passed=True,
        notes=(said, weights),
        measured=("cpu_s", "units_s"),
    )
