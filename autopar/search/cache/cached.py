"""Strategies that look for a plan on disk before they search for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.plan import Plan
from autopar.search.branches import branches
from autopar.search.cache.key import key_of
from autopar.search.cache.store import PlanCache
from autopar.search.clock import Clock
from autopar.search.outcome import Bounded
from autopar.search.pipelines import pipeline
from autopar.search.problem import Problem
from autopar.search.registry import Strategy, cuts_stages
from autopar.search.trail import Trail
from autopar.solver.meter import Meter


@dataclass(frozen=True)
class Cached:
    """A planner whose plans are kept: itself a strategy.

    A plan that was kept has the content that it had, and one phase, "cache"; its work counts as if it was planned. A
    solver that stopped at its time limit leaves a plan whose bound is below its cost; it is kept like any other, for
    the limit is part of the key: to search for longer ask for more time. That no plan fits is not kept.

    Args:
        search: plans what is not kept.
        cache: where plans are kept.
        planner: what ``search`` is, for the key: see `key_of`.
    """

    search: Callable[[Problem], Plan | Bounded]
    cache: PlanCache
    planner: Any

    def __call__(self, problem: Problem) -> Plan | Bounded:
        """The plan of a problem. Errors are those of the search."""
        clock = Clock()
        with clock.phase("cache"):
            key = key_of(problem, self.planner, self.cache.environment_hash)
            kept = None if key is None else self.cache.get_metered(key)
        if kept is not None:
            plan, meter, rows = kept
            problem.meter.merge(meter)
            problem.trail.rows.extend(rows)
            problem.log(f"read the plan of {problem.graph.name} from the cache {self.cache.folder}")
            return Plan(plan.content, clock.phases(), details=plan.details)
        began, meter, trail = time.perf_counter(), Meter(search=problem.meter), Trail()
        source = None if problem.source is None else problem.source.metered(meter)
        try:
            answer = self.search(replace(problem, source=source, meter=meter, trail=trail))
        finally:
            problem.meter.merge(meter)
            problem.trail.rows.extend(trail.rows)
        if isinstance(answer, Bounded):
            return answer
        if key is not None and time.perf_counter() - began >= self.cache.least_s:
            self.cache.put(key, answer.content, answer.details, meter, trail.rows)
        return answer


def cached(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A strategy whose plans are kept; the strategy as it is where there is no cache."""
    return strategy if cache is None else Cached(strategy, cache, strategy)


def cached_with_stages(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A planner of several stages by a strategy; plans of stages and of the whole are kept where there is a cache.

    That is the strategy where it cuts the step into stages itself, else the search of pipelines.
    """
    if cuts_stages(strategy):
        return cached(strategy, cache)
    whole = partial(pipeline, intra=cached(strategy, cache))
    return whole if cache is None else Cached(whole, cache, ("pipeline", strategy))


def cached_with_branches(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A planner of independent branches side by side, by a strategy that shards one stage."""
    whole = partial(branches, intra=cached(strategy, cache))
    return whole if cache is None else Cached(whole, cache, ("branches", strategy))
