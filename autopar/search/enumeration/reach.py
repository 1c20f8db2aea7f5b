"""What pipelines of a step could reach at best, so that none is planned where one stage is as fast.

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
from autopar.ir.phases import phase_of
from autopar.microbatch import batch_size
from autopar.search.attention_blocks import block_scores
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.search_space import stage_counts
from autopar.search.problem import Problem, not_faster
from autopar.search.sure_work import sure_works


def may_be_faster(problem: Problem, counts: Sequence[int] | None, cutoff_s: float) -> None:
    """Returns where a pipeline may take less than ``cutoff_s``.

    Args:
        problem: the step in one microbatch.
        counts: numbers of microbatches that may be taken; None for all.
        cutoff_s: seconds of a plan that is at hand.

    Raises:
        NotFasterError: at its best none does; or the devices are those of one process on a CPU, which runs programs of
            several devices one after another, so that stages never overlap; or nothing is differentiated, on one node.
    """
    may_overlap(problem, cutoff_s)
    trains = any(phase_of(op) == "backward" for op in problem.graph.operators)
    if problem.cluster.num_nodes == 1 and not trains:
        raise not_faster(problem, cutoff_s, "without a backward pass the caller waits for each step")
    reached_s = least_s(problem, counts)
    if reached_s >= cutoff_s:
        raise not_faster(problem, cutoff_s, f"at its best a pipeline takes {reached_s:.6g} s")


def may_overlap(problem: Problem, cutoff_s: float) -> None:
    """Returns where programs of several devices may run at once; arguments as of `may_be_faster`.

    Raises:
        NotFasterError: the devices are those of one process on a CPU.
    """
    if problem.cluster.num_nodes == 1 and all("cpu" in d.jax_kinds for d in problem.cluster.device_types):
        raise not_faster(problem, cutoff_s, "stages in one process on a CPU do not overlap")


def least_s(problem: Problem, counts: Sequence[int] | None) -> float:
    """Seconds of the best equal pipeline that communicates nothing inside its stages."""
    return min(least_by_stages(problem, counts).values(), default=float("inf"))


def least_by_stages(problem: Problem, counts: Sequence[int] | None) -> dict[int, float]:
    """`least_s` by number of stages, of those that some number of microbatches is possible with."""
    size = batch_size(problem.graph) or 1
    possible = counts or [2**k for k in range(size.bit_length()) if size % 2**k == 0]
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
    for stages in stage_counts(problem, schedule):
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
