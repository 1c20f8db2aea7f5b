"""Every strategy on every saved problem under the same budget: ranks, spread over seeds, best cost against time.

The problems lie in ``problems``; ``python -m benchmarks.search.make`` writes them. All of them have one stage, so
strategies that cut stages are left out, and so is `exhaustive`, which refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from autopar.search import Problem
from autopar.search.compare import Budget, Comparison, compare_problem
from autopar.search.problem_data import load_problem
from benchmarks.report import Report, Row, Say

FOLDER = Path(__file__).resolve().parent / "problems"
NAMES = (
    "alpa", "data-parallel", "zero1", "zero2", "zero3", "megatron",
    "beam", "evolutionary", "mcmc", "random", "reinforce",
)  # fmt: skip
BUDGET = Budget(time_limit_s=20.0, steps=5_000, seeds=(0, 1, 2))

QUICK_PROBLEMS = ("unet-tiny-a100x8",)
QUICK_NAMES = ("alpa", "data-parallel", "mcmc", "beam")
QUICK_BUDGET = Budget(time_limit_s=20.0, steps=300, seeds=(0, 1))

#: Seconds at which the anytime curves are read.
TIMES_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

TARGET = 1 + 1e-9


def saved_problems() -> dict[str, Path]:
    """Files of problems by name, sorted."""
    return {p.name.removesuffix(".json.gz"): p for p in sorted(FOLDER.glob("*.json.gz"))}


def rows_of(name: str, problem: Problem, found: Comparison) -> Iterable[Row]:
    """A row for each strategy: its place, its best objective over that of the integer program, spread, seconds."""
    base = next((s.objective for s in found.ranking() if s.strategy == "alpa"), None)
    for s in found.ranking():
        yield {
            "problem": name,
            "strategy": s.strategy,
            "place": s.place,
            "step_s": s.step_times[0] if s.step_times else None,
            "to best": s.ratio,
            "objective to alpa": s.objective / base if s.objective and base else None,
            "spread of seeds": s.spread if len(s.step_times) > 1 else None,
            "peak_bytes": s.peak_memory,
            "median planning_s": s.seconds,
            "note": s.note[:60],
        }


def curves_of(name: str, found: Comparison) -> Iterable[Row]:
    """A row for each search: the best objective known at each of `TIMES_S`, over that of the integer program."""
    base = next((t.curve[-1][1] for t in found.trials if t.strategy == "alpa" and t.curve), math.nan)
    for t in found.trials:
        known = {at: min((cost for s, cost in t.curve if s <= at), default=None) for at in TIMES_S}
        yield {
            "problem": name,
            "strategy": t.strategy,
            "seed": t.seed,
            **{f"at {at:g} s": None if cost is None else cost / base for at, cost in known.items()},
            "end": t.curve[-1][1] / base if t.curve else None,
            "planning_s": t.seconds,
        }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one problem, few strategies and few steps."""
    files = saved_problems()
    names, budget = (QUICK_NAMES, QUICK_BUDGET) if quick else (NAMES, BUDGET)
    rows: list[Row] = []
    curves: list[Row] = []
    for name in QUICK_PROBLEMS if quick else files:
        say(f"search: {name}")
        problem = load_problem(files[name])
        found = compare_problem(problem, names, budget)
        rows += rows_of(name, problem, found)
        curves += curves_of(name, found)
    ratios = [row["objective to alpa"] for row in rows if row["objective to alpa"] is not None]
    worst = max((row["to best"] for row in rows if row["strategy"] == "alpa"), default=math.inf)
    return Report(
        "search",
        "no strategy's plan costs less than that of the integer program",
        tuple(rows),
        bool(ratios) and min(ratios) >= 1 / TARGET,
        (
            f"budget for each mesh: {budget.steps:,} choices, {budget.time_limit_s:g} s; seeds {budget.seeds}",
            f"the integer program's step time is at most {worst:.4f} of the best on each problem",
        ),
        details=(("best objective at a time, over the integer program's", tuple(curves)),),
        measured=("median planning_s", "planning_s"),
    )
