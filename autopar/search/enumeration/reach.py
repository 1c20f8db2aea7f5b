"""What pipelines of a step could reach at best, so that none is planned where one stage is as fast.

A pipeline of S equal stages on n = D / S devices each takes, with m microbatches of which each takes t on all stages,

    T = t (m + (S - 1) / 3) / S + update / S + 2 (S - 1) latency,    t = sum over operators of (launch + work / (m n))

where every device reaches its best rate, nothing is communicated inside a stage, and of the bubble a third is left, as
where weight gradients fill it. That is an estimate, for stages may
be unequal; it is used for what is not planned at all, and no bound is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.ir.phases import phase_of
from autopar.microbatch import batch_size
from autopar.search.bound import BestRates, works_of
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.search_space import stage_counts
from autopar.search.problem import Problem, not_faster


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
    trains = any(phase_of(op.scope) == "backward" for op in problem.graph.operators)
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
    rates, cluster = BestRates(problem.cluster), problem.cluster
    launch_s = min(d.launch_s for d in cluster.device_types)
    latency_s = min(g.intra.latency_s for g in cluster.groups)
    loop: list[tuple[float, float]] = []
    update: list[tuple[float, float]] = []
    for work in works_of(problem.graph, fused=problem.cost_model.fuses):
        target = update if work.phase == "update" else loop
        target.append((work.runs, work.runs * rates.seconds(work.dtypes, work.flops, work.bytes)))
    seconds: dict[int, float] = {}
    schedule, left = schedule_of(problem), problem.policy.schedules.bubble_left
    for stages in stage_counts(problem, schedule):
        devices = cluster.num_devices / stages
        own_s = sum(runs * launch_s + s / devices for runs, s in update) / stages
        for count in possible:
            try:
                schedule.table(stages, count)
            except ScheduleError:
                continue
            each_s = sum(runs * launch_s + s / devices / count for runs, s in loop)
            step_s = each_s * (count + (stages - 1) * left) / stages + own_s + 2 * (stages - 1) * latency_s
            seconds[stages] = min(step_s, seconds.get(stages, step_s))
    return seconds
