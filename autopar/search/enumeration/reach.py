"""Least seconds of pipelines of a step, by the number of their stages.

A pipeline of S equal stages on n = D / S devices each takes, with m microbatches of which each takes t on all stages,

    T = t (m + (S - 1) / 3) / S + update / S + 2 (S - 1) latency,    t = sum over operators of t(o, m n)

with what is sure of each operator (`autopar.search.sure_work`) in its least seconds on each of so many devices. Nothing
is communicated inside a stage, and of the bubble a third is left, as where weight gradients fill it. That is an
estimate, for stages may be unequal; it is used for what is not planned at all, and no bound is made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from autopar.cost import LeastWork
from autopar.errors import ScheduleError
from autopar.microbatch import even_counts
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.search_space import stage_counts
from autopar.search.problem import Problem
from autopar.search.sure_work import sure_works
from autopar.search.techniques.attention_blocks import block_scores

#: What closes a number of stages, in words.
EQUAL_STAGES = "equal stages that send nothing, an estimate"


def least_by_stages(
    problem: Problem, counts: Sequence[int] | None, numbers: Sequence[int] | None = None
) -> dict[int, float]:
    """Seconds of the best equal pipeline by number of stages, of those that may run in some number of microbatches.

    Args:
        problem: the step in one microbatch.
        counts: numbers of microbatches that may be taken; None for all.
        numbers: of stages; None for those that are worth trying.
    """
    possible = counts or even_counts(problem.graph)
    cluster, cost = problem.cluster, problem.cost_model
    latency_s = min(g.intra.latency_s for g in cluster.groups)
    works: dict[bool, dict[LeastWork, float]] = {False: defaultdict(float), True: defaultdict(float)}
    for work in sure_works(problem.graph, cost, block_scores(problem)):
        works[work.phase == "update"][work.least] += work.runs

    @cache
    def each_s(parts: float, is_update: bool) -> float:
        return sum(runs * cost.least_s(least, parts) for least, runs in works[is_update].items())

    seconds: dict[int, float] = {}
    schedule, left = schedule_of(problem), problem.policy.schedules.bubble_left
    for stages in stage_counts(problem, schedule) if numbers is None else numbers:
        devices = cluster.num_devices / stages
        own_s = each_s(devices, True) / stages
        for count in possible:
            try:
                schedule.table(stages, count)
            except ScheduleError:
                continue
            busy_s = each_s(devices * count, False) * (count + (stages - 1) * left)
            step_s = busy_s / stages + own_s + 2 * (stages - 1) * latency_s
            seconds[stages] = min(step_s, seconds.get(stages, step_s))
    return seconds
