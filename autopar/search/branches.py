"""The search of branches side by side: which are in a stage of their own, on what devices, in how many microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.search.clock import Clock
from autopar.search.cuttable import CuttableStep
from autopar.search.enumeration.candidates import Candidate
from autopar.search.enumeration.side_by_side import side_by_side
from autopar.search.outcome import Bounded
from autopar.search.pipeline_trials import PipelineSearch, PipelineTrial, fastest_of, nothing_planned, seconds_of
from autopar.search.problem import Problem
from autopar.search.trials import Trials


def branches(problem: Problem, intra: Callable[[Problem], Plan | Bounded]) -> Plan | Bounded:
    """The best plan with independent branches side by side on parts of the devices.

    Args:
        problem: what is planned; it has a source.
        intra: plans one stage on its submesh.

    Raises:
        InfeasiblePlanError: the step has no such branches, or no way of placing them fits.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    source, clock = problem.source, Clock()
    if source is None:
        raise _no_branches(problem)
    search = PipelineSearch(CuttableStep(problem, source, intra), clock, form="branches")
    trials: Trials[PipelineTrial, Plan] = Trials(search.attempt)
    plans: list[Plan] = []
    of_counts = side_by_side(problem, source)
    for some in of_counts:
        plans = trials.run([PipelineTrial(c, is_optional=True) for c in some])
        if plans:
            break
    if plans:
        plans += _in_more_microbatches(search, trials, of_counts)
    if not plans:
        if trials.failures or trials.impossible or trials.bounded is not None:
            return nothing_planned(problem, trials)
        raise _no_branches(problem)
    return fastest_of(plans, clock)


def _in_more_microbatches(
    search: PipelineSearch, trials: Trials[PipelineTrial, Plan], of_counts: Iterator[list[Candidate]]
) -> list[Plan]:
    """Plans of the placements that gain most from more microbatches, up to the number that gains nothing.

    With m times the microbatches a step of T seconds whose busiest worker is busy for B of them is estimated at

        B + (T - B) / m

    for what the others do before and behind it is that of one microbatch. Of each number the placement of the least
    estimate is planned, with those whose stages have as many devices, which share its plans of stages: as long as it
    may be faster than all that is planned, and than the plan at hand.

    Args:
        search: has the plans in the fewest microbatches.
        trials: plans a candidate.
        of_counts: candidates in more microbatches, by rising number.
    """
    plans, least_gain = list[Plan](), search.problem.policy.effort.least_gain
    first = {_placement(c): (plan, c) for plan, c in search.planned}
    for some in of_counts:
        fastest_s = min([search.problem.subproblem.cutoff_s, *(plan.step_time for plan, _ in search.planned)])
        estimates_s = {}
        for candidate in some:
            if (known := first.get(_placement(candidate))) is not None:
                plan, fewest = known
                busiest_s = _busiest_s(plan, fewest)
                estimates_s[candidate] = busiest_s + (plan.step_time - busiest_s) * fewest.count / candidate.count
        least = min(estimates_s, key=lambda c: estimates_s[c], default=None)
        if least is None or estimates_s[least] > (1 - least_gain) * fastest_s:
            break
        equal = [c for c in some if _sizes(c) == _sizes(least)]
        planned = trials.run([PipelineTrial(c, is_optional=True) for c in equal], cutoff_s=fastest_s)
        plans += planned
        if min(map(seconds_of, planned), default=math.inf) >= fastest_s:
            break
    return plans


def _placement(candidate: Candidate) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, int], ...]]:
    """Stages of a candidate and their devices, whatever the number of microbatches."""
    return candidate.members, candidate.devices


def _sizes(candidate: Candidate) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Stages of a candidate and their numbers of devices."""
    return candidate.members, tuple(size for _, size in candidate.devices)


def _busiest_s(plan: Plan, candidate: Candidate) -> float:
    """Seconds for which the busiest worker of a plan works."""
    busy_s: dict[tuple[int, int], float] = {}
    for stage, devices in zip(plan.stages, candidate.devices, strict=True):
        busy_s[devices] = busy_s.get(devices, 0.0) + sum(s for kind, s in stage.work_times if kind != "weight")
    return max(busy_s.values())


def _no_branches(problem: Problem) -> InfeasiblePlanError:
    stages = problem.job.num_stages
    return InfeasiblePlanError(
        f"{problem.graph.name} has no independent branches that may run side by side"
        + ("" if stages is None else f" in {stages} stages"),
        cause="every expensive operator waits for the others, or there is one device",
        remedy='schedule="auto", and num_stages="auto" where branches are asked for',
    )
