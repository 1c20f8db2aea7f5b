"""Common parts of strategies that cut a step into stages by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.errors import InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.plan import Plan
from autopar.search.alpa import alpa
from autopar.search.cuttable import CuttableStep
from autopar.search.enumeration.candidates import Candidate
from autopar.search.enumeration.search_space import microbatch_counts
from autopar.search.named import renamed
from autopar.search.outcome import within_reach
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.search.stage_planning.candidate import plan_candidate


@dataclass(frozen=True)
class Cut:
    """A problem that can be cut: its source, and the number of microbatches of every try."""

    problem: Problem
    source: StageSource
    counts: tuple[int, ...]


def one_stage(problem: Problem, name: str) -> Plan:
    """The plan of one stage by the integer program, for problems that cannot be cut."""
    return renamed(within_reach(alpa(problem)), name, f"{name}: one stage, as nothing was there to cut")


def cuttable(problem: Problem, name: str) -> Cut | None:
    """``problem`` as one that can be cut; None where one stage is all that is asked for or that there can be.

    Raises:
        InfeasiblePlanError: several stages were asked for and the problem has no source or devices for them.
    """
    asked, devices = problem.job.num_stages, problem.cluster.num_devices
    if problem.source is None or devices == 1:
        if asked is not None and asked > 1:
            raise InfeasiblePlanError(
                f"{name} cannot make {asked} stages of {problem.graph.name}",
                cause="one device" if devices == 1 else "the problem was made from a graph alone",
                remedy="more devices" if devices == 1 else "plan by autopar.parallelize(...).plan(...)",
            )
        return None
    if asked == 1:
        return None
    count = problem.job.num_microbatches
    return Cut(problem, problem.source, tuple(microbatch_counts(problem)) if count is None else (count,))


def best_candidate(
    cut: Cut, name: str, schedule: str, candidates: Iterable[Candidate], planned: int = 3, failed: int = 12
) -> Plan:
    """The fastest plan of the candidates with the least estimates; inside a stage the integer program shards.

    Args:
        cut: what is planned.
        name: name of the strategy.
        schedule: name of the schedule where the job leaves it free.
        candidates: ways to cut.
        planned: number of them that are planned exactly, those with the least estimates.
        failed: number of them that may fail before none is tried any more.

    Raises:
        InfeasiblePlanError: none of them fits the memory, or there is none.
    """
    problem = cut.problem
    if problem.job.schedule in ("auto", "none"):
        problem = replace(problem, job=replace(problem.job, schedule=schedule))
    plans: list[Plan] = []
    failures: list[InfeasiblePlanError | ScheduleError] = []
    for candidate in sorted(candidates, key=lambda c: (c.estimate_s, c.count, len(c.members))):
        if len(plans) == planned or len(failures) == failed:
            break
        try:
            plans.append(within_reach(plan_candidate(CuttableStep(problem, cut.source, alpa), candidate)))
        except (InfeasiblePlanError, ScheduleError) as error:
            failures.append(error)
    if plans:
        return renamed(min(plans, key=lambda p: p.step_time), name)
    if failures:
        raise failures[0]
    raise InfeasiblePlanError(
        f"{name} finds no way to cut {problem.graph.name} into stages on {problem.cluster.name}",
        cause="too few layers or devices for the number of stages",
        remedy="fewer stages, or search='alpa'",
    )


def dividing_counts(cut: Cut) -> list[int]:
    """The numbers of microbatches that the step can be cut into. MicrobatchError where one was asked for and cannot."""
    good = []
    for count in cut.counts:
        try:
            cut.source.microbatches(count)
        except MicrobatchError:
            if cut.problem.job.num_microbatches is not None:
                raise
            continue
        good.append(count)
    return good
