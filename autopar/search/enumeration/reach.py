"""Least seconds of pipelines of a step, by the number of their stages.

A pipeline of S equal stages on n = D / S devices each takes, with m microbatches of which each takes t on all stages,

    T = t (m + (S - 1) / 3) / S + update / S,    t = sum over operators of t(o, m n)

with what is sure of each operator (`autopar.search.sure_work`) in its least seconds on each of so many devices, and
with what stages send each other (`autopar.search.enumeration.sends`). Nothing is communicated inside a stage, and of
the bubble a third is left, as where weight gradients fill it. One stage may have all of the step instead: m t + update.
That is an estimate, for stages may be unequal; it is used for what is not planned at all, and no bound is made of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost import CostModel, LeastWork
from autopar.errors import ScheduleError
from autopar.microbatch import even_counts
from autopar.search.enumeration.candidates import schedule_of
from autopar.search.enumeration.search_space import stage_counts
from autopar.search.enumeration.sends import sends_of
from autopar.search.problem import Problem
from autopar.search.sure_work import sure_works
from autopar.search.techniques.attention_blocks import block_scores

#: What closes a number of stages, in words.
EQUAL_STAGES = "equal stages that send each other the least, an estimate"


@dataclass(frozen=True)
class SureSeconds:
    """Least seconds of a step on so many devices, each part of it on all of them.

    Args:
        cost: what things cost.
        passes: runs in one microbatch of what is sure of the passes.
        update: likewise of the update.
    """

    cost: CostModel
    passes: Mapping[LeastWork, float]
    update: Mapping[LeastWork, float]

    @staticmethod
    def of(problem: Problem) -> SureSeconds:
        """Seconds of a problem, found once in a search."""
        graph, cost, blocks = problem.graph, problem.cost_model, block_scores(problem)

        def make() -> SureSeconds:
            passes, update = defaultdict[LeastWork, float](float), defaultdict[LeastWork, float](float)
            for work in sure_works(graph, cost, blocks):
                (update if work.phase == "update" else passes)[work.least] += work.runs
            return SureSeconds(cost, passes, update)

        return problem.store.once(problem.store.key("sure seconds", graph, cost, blocks), make)

    def pass_s(self, parts: float) -> float:
        """Seconds of one microbatch in ``parts``: devices times microbatches."""
        return math.fsum(runs * self.cost.least_s(least, parts) for least, runs in self.passes.items())

    def update_s(self, devices: float) -> float:
        """Seconds of the update on each of so many devices."""
        return math.fsum(runs * self.cost.least_s(least, devices) for least, runs in self.update.items())


def least_by_stages(
    problem: Problem, counts: Sequence[int] | None, numbers: Sequence[int] | None = None
) -> dict[int, float]:
    """Seconds of the best equal pipeline by number of stages, of those that may run in some number of microbatches.

    Args:
        problem: the step in one microbatch.
        counts: numbers of microbatches that may be taken; None for all.
        numbers: of stages; None for those that are worth trying.
    """
    possible, sure = counts or even_counts(problem.graph), SureSeconds.of(problem)
    seconds, pass_s = dict[int, float](), dict[float, float]()
    schedule, left = schedule_of(problem), problem.policy.schedules.bubble_left
    for stages in stage_counts(problem, schedule) if numbers is None else numbers:
        devices, sends = problem.cluster.num_devices / stages, sends_of(problem, stages)
        own_s = sure.update_s(devices) / stages
        for count in possible:
            try:
                schedule.table(stages, count)
            except ScheduleError:
                continue
            parts = devices * count
            pass_s[parts] = pass_s[parts] if parts in pass_s else sure.pass_s(parts)
            alone_s = pass_s[parts] * count + own_s * stages
            step_s = sends.filled_s(count, pass_s[parts] * count / stages, left, least=1.0) + own_s
            step_s = min(step_s, alone_s)
            seconds[stages] = min(step_s, seconds.get(stages, step_s))
    return seconds
