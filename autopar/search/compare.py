"""Plans one problem with several strategies under one budget, and ranks them by predicted step time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.plan.columns import table
from autopar.plan.text import bytes_text, gap_text, seconds_text
from autopar.plan.throughput import throughput
from autopar.search.job import Solving
from autopar.search.outcome import within_reach
from autopar.search.problem import Problem, Progress
from autopar.search.registry import Strategy, answer_of, cuts_stages, strategy_named

#: Strategies that are compared unless others are named.
STANDARD = ("alpa", "data-parallel", "zero1", "zero3", "megatron")


@dataclass(frozen=True)
class Budget:
    """Budget of each strategy of a comparison.

    Args:
        time_limit_s: seconds for one mesh; None waits.
        steps: choices for one mesh; None for each strategy's own number.
        seeds: a search for each of them; the numbers of a strategy that draws none are those of the first.
    """

    time_limit_s: float | None = 60.0
    steps: int | None = None
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s >= 0:
            raise AutoparError(f"time_limit_s={self.time_limit_s!r} is no number of seconds", remedy="60, or None")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise AutoparError(f"steps={self.steps!r} is no number of choices", remedy="1 or more, or None")
        if not self.seeds or any(not isinstance(seed, int) for seed in self.seeds):
            raise AutoparError(f"seeds={self.seeds!r} are no seeds", remedy="one number or more, as seeds=(0, 1)")


@dataclass(frozen=True)
class Budgeted:
    """A strategy under a budget: itself a strategy. ``seen`` collects what it says while it searches."""

    strategy: Strategy
    budget: Budget
    seed: int
    seen: list[Progress] = field(default_factory=list)

    @property
    def cuts_stages(self) -> bool:
        """Whether the strategy cuts the step into stages itself."""
        return cuts_stages(self.strategy)

    def __call__(self, problem: Problem) -> Plan:
        """The strategy's plan for ``problem``, whose own budget and seed do not count."""
        b = self.budget
        solving = Solving(b.time_limit_s, b.steps, self.seed)
        reporting = replace(problem.reporting, progress=self.seen.append)
        return within_reach(answer_of(self.strategy, replace(problem, solving=solving, reporting=reporting)))


@dataclass(frozen=True)
class Trial:
    """One search.

    Args:
        strategy: its name.
        seed: of its random numbers.
        seconds: wall-clock seconds of planning, tracing included where it belongs to it.
        plan: what it found; None where it failed.
        failure: the first line of its error, or "".
        curve: (seconds since it began, predicted seconds of the best plan so far), falling.
    """

    strategy: str
    seed: int
    seconds: float
    plan: Plan | None
    failure: str
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Standing:
    """A strategy's place.

    Args:
        strategy: its name.
        place: from 1; those that are equally fast share one; None where no seed found a plan.
        step_times: predicted seconds a step of each seed's plan, rising.
        objective: seconds that the best of them minimized.
        peak_memory: bytes a device of the best.
        dollars: price of a million tokens of the best, of a million examples where the batch has no tokens; None where
            the cluster has no price.
        seconds: median seconds of planning.
        ratio: step time of the best over that of the first place.
        note: gap to the lower bound, or why there is no plan.
    """

    strategy: str
    place: int | None
    step_times: tuple[float, ...]
    objective: float | None
    peak_memory: int | None
    dollars: float | None
    seconds: float
    ratio: float | None
    note: str

    @property
    def spread(self) -> float:
        """Slowest plan over fastest, less one; 0 for one seed."""
        return self.step_times[-1] / self.step_times[0] - 1 if self.step_times and self.step_times[0] else 0.0


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Args:
        program: name of the function.
        cluster: the cluster's name.
        budget: of every search.
        trials: all searches, in the order in which they ran.
    """

    program: str
    cluster: str
    budget: Budget
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Plan:
        """The plan predicted fastest. Raises AutoparError where no strategy found one."""
        plans = [t.plan for t in self.trials if t.plan is not None]
        if not plans:
            raise AutoparError(f"no strategy found a plan for {self.program} on {self.cluster}")
        return min(plans, key=lambda p: p.step_time)

    def ranking(self) -> tuple[Standing, ...]:
        """Strategies by the step time of their fastest plan, those without a plan last."""
        names = list(dict.fromkeys(t.strategy for t in self.trials))
        standings = [self._standing(name) for name in names]
        standings.sort(key=lambda s: s.step_times[0] if s.step_times else float("inf"))
        times = [s.step_times[0] for s in standings if s.step_times]
        return tuple(
            replace(
                s,
                place=1 + sum(t < s.step_times[0] * (1 - 1e-9) for t in times) if s.step_times else None,
                ratio=s.step_times[0] / times[0] if s.step_times and times[0] else None,
            )
            for s in standings
        )

    def _standing(self, name: str) -> Standing:
        trials = [t for t in self.trials if t.strategy == name]
        plans = sorted((t.plan for t in trials if t.plan is not None), key=lambda p: p.step_time)
        seconds = statistics.median(t.seconds for t in trials)
        if not plans:
            return Standing(name, None, (), None, None, None, seconds, None, trials[0].failure)
        gap = plans[0].search.gap
        return Standing(
            name,
            None,
            tuple(p.step_time for p in plans),
            plans[0].search.objective,
            plans[0].peak_memory,
            throughput(plans[0].content).dollars_per_million,
            seconds,
            None,
            "" if gap is None or plans[0].search.strategy != "alpa" else gap_text(gap),
        )

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The ranking as text, a row for each strategy, under the headers of `columns`."""
        ranking = self.ranking()
        priced = len(self.columns()) > len(_BEFORE_PRICE) + len(_AFTER_PRICE)
        return tuple(
            (
                "-" if s.place is None else str(s.place),
                s.strategy,
                seconds_text(s.step_times[0]) if s.step_times else "-",
                "-" if s.ratio is None else f"{s.ratio:.3f}",
                f"{s.spread:.1%}" if len(s.step_times) > 1 else "-",
                "-" if s.peak_memory is None else bytes_text(s.peak_memory),
                *(("-" if s.dollars is None else f"${s.dollars:.3g}",) if priced else ()),
                seconds_text(s.seconds),
                s.note,
            )
            for s in ranking
        )

    def columns(self) -> tuple[str, ...]:
        """Headers of `rows`; with a price where the cluster has one."""
        plans = [t.plan for t in self.trials if t.plan is not None]
        rates = [throughput(p.content) for p in plans]
        if all(r.dollars_per_million is None for r in rates):
            return (*_BEFORE_PRICE, *_AFTER_PRICE)
        unit = "tokens" if any(r.tokens for r in rates) else "examples"
        return (*_BEFORE_PRICE, f"a million {unit}", *_AFTER_PRICE)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the anytime curve of every search."""
        return {
            "program": self.program,
            "cluster": self.cluster,
            "time_limit_s": self.budget.time_limit_s,
            "steps": self.budget.steps,
            "seeds": list(self.budget.seeds),
            "ranking": [
                {
                    "place": s.place,
                    "strategy": s.strategy,
                    "step_time_s": list(s.step_times),
                    "ratio": s.ratio,
                    "objective_s": s.objective,
                    "peak_memory_bytes": s.peak_memory,
                    "dollars_per_million": s.dollars,
                    "planning_s": s.seconds,
                    "note": s.note,
                }
                for s in self.ranking()
            ],
            "trials": [
                {
                    "strategy": t.strategy,
                    "seed": t.seed,
                    "planning_s": t.seconds,
                    "step_time_s": None if t.plan is None else t.plan.step_time,
                    "failure": t.failure,
                    "curve": [list(point) for point in t.curve],
                }
                for t in self.trials
            ],
        }

    def __str__(self) -> str:
        return f"{self.program} on {self.cluster}\n{table(self.columns(), self.rows())}"


#: Headers of `Comparison.rows`, before and after that of the price.
_BEFORE_PRICE = ("place", "strategy", "step time", "to best", "spread", "peak memory")
_AFTER_PRICE = ("planning", "note")


#: A strategy by its registered name, or as (name that the table shows, strategy).
Named = str | tuple[str, Strategy]


def compare_problem(
    problem: Problem, names: Sequence[Named], budget: Budget, say: Callable[[str], None] | None = None
) -> Comparison:
    """Strategies on one problem.

    Args:
        problem: what is planned; one that has no source has one stage in every plan.
        names: registered names, or strategies with names.
        budget: of every search.
        say: called with a line when a search begins.

    Raises:
        AutoparError: there is no strategy of a name.
    """
    trials = run_trials(names, budget, lambda strategy: strategy(problem), say)
    return Comparison(problem.graph.name, str(problem.cluster), budget, trials)


def run_trials(
    names: Sequence[Named], budget: Budget, plan: Callable[[Budgeted], Plan], say: Callable[[str], None] | None = None
) -> tuple[Trial, ...]:
    """Every strategy with every seed; further seeds only of those that say more than once what they have.

    Args:
        names: registered names, or strategies with names.
        budget: of every search.
        plan: makes the plan of a strategy.
        say: called with a line when a search begins.
    """
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or any(not isinstance(n, str) and len(n) != 2 for n in names):
        raise AutoparError(
            f"search={names!r} are no strategies",
            remedy='names as search=("alpa", "zero3"), or pairs (name in the table, strategy)',
        )
    known = [(n, strategy_named(n)) if isinstance(n, str) else n for n in names]
    trials: list[Trial] = []
    for name, strategy in known:
        for number, seed in enumerate(budget.seeds):
            if say is not None:
                say(f"{name}, seed {seed}" if len(budget.seeds) > 1 else name)
            trial = _trial(name, Budgeted(strategy, budget, seed), plan)
            trials.append(trial)
            if not number and not trial.curve[:-1]:
                break  # it draws nothing
    return tuple(trials)


def _trial(name: str, strategy: Budgeted, plan: Callable[[Budgeted], Plan]) -> Trial:
    began = time.perf_counter()
    try:
        result = plan(strategy)
    except AutoparError as error:
        return Trial(name, strategy.seed, time.perf_counter() - began, None, error.fact, ())
    seconds = time.perf_counter() - began
    curve = [(p.seconds, p.objective_s) for p in strategy.seen]
    return Trial(name, strategy.seed, seconds, result, "", (*curve, (seconds, result.search.objective)))
