"""`PipelineSearch`: plans slicings of a step, for the search of pipelines and for that of branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from autopar.cost import total_flops
from autopar.errors import ConstraintError, InfeasiblePlanError, MicrobatchError, ScheduleError
from autopar.errors.names import counted
from autopar.ir import Graph, Literal, Operator
from autopar.ir.phases import phase_of
from autopar.plan import Considered, Plan
from autopar.schedule import get
from autopar.search.clock import Clock
from autopar.search.outcome import Bounded
from autopar.search.pipeline.candidates import Candidate, CuttableStep
from autopar.search.pipeline.plan_candidate import plan_candidate
from autopar.search.pipeline.schedules import with_launches
from autopar.search.problem import Problem
from autopar.search.trail import Region
from autopar.search.trials import Trials


@dataclass(frozen=True)
class PipelineTrial:
    """A candidate that may be planned.

    Args:
        candidate: stages and their devices.
        below_s: seconds, launches included, that its plan must stay below.
        is_optional: whether another plan is there, so that a schedule that cannot run it is no fault.
    """

    candidate: Candidate
    below_s: float = math.inf
    is_optional: bool = False

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return self.candidate.count

    def described(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        """``error``, which names the stage."""
        return error


@dataclass(frozen=True)
class PipelineSearch:
    """The search of the pipelines of one problem.

    Args:
        step: what is planned.
        clock: takes the time of phases.
        planned: plans with what they are of.
        form: "pipeline" or "branches".
        bounded: what closed all slicings before any was planned.
    """

    step: CuttableStep
    clock: Clock
    planned: list[tuple[Plan, Candidate]] = field(default_factory=list)
    form: str = "pipeline"
    bounded: list[Bounded] = field(default_factory=list)

    @property
    def problem(self) -> Problem:
        """The problem of the whole step."""
        return self.step.problem

    def attempt(self, trial: PipelineTrial, cutoff_s: float, explain: bool) -> Plan | Bounded:
        """The plan of a candidate; `Bounded` where it does not stay below ``cutoff_s``.

        Args:
            trial: the candidate.
            cutoff_s: seconds of a step.
            explain: whether the error where it does not fit says the least memory that would do.
        """
        problem, candidate = self.problem, trial.candidate
        problem.spend()
        name = "" if candidate.schedule is None else candidate.schedule.name
        region = Region.of_stages(self.form, [len(candidate.members)], [candidate.count], name)
        limit = problem.memory_limit_bytes
        return problem.trail.tried(region, problem.meter, limit, lambda: self._attempt(trial, cutoff_s))

    def _attempt(self, trial: PipelineTrial, cutoff_s: float) -> Plan | Bounded:
        problem, candidate = self.problem, trial.candidate
        with self.clock.phase("stages"):
            try:
                plan = plan_candidate(self.step, candidate, cutoff_s)
            except ConstraintError as error:  # other slicings give the stage more devices
                raise InfeasiblePlanError(error.fact, cause=error.cause, remedy=error.remedy) from error
            except ScheduleError as error:
                if not trial.is_optional:
                    raise
                raise InfeasiblePlanError(error.fact, cause=error.cause, remedy=error.remedy) from error
        if isinstance(plan, Bounded):
            return plan
        if trial.below_s < math.inf and launched_s(problem, plan, plan.schedule, trial.candidate) >= trial.below_s:
            return Bounded(f"schedule {plan.schedule} is timed as no faster", plan.step_time)
        self.planned.append((plan, candidate))
        return plan


def launched_s(problem: Problem, plan: Plan, schedule: str, candidate: Candidate) -> float:
    """Seconds of a step with those of launches by a schedule."""
    table = get(schedule).table(len(candidate.members), candidate.count)
    return with_launches(problem.cost_model.starts, plan.step_time, table)


def seconds_of(plan: Plan) -> float:
    """Seconds of a step."""
    return plan.step_time


def fastest_of(plans: Sequence[Plan], clock: Clock) -> Plan:
    """The fastest of some plans, whose record has the others; its phases are those of ``clock``."""
    best = min(plans, key=seconds_of)
    record = msgspec.structs.replace(best.content.search, considered=_considered(plans, best))
    return Plan(msgspec.structs.replace(best.content, search=record), clock.phases())


def _considered(plans: Sequence[Plan], best: Plan) -> tuple[Considered, ...]:
    """The fastest plan of each kind."""
    kinds: dict[str, Plan] = {}
    for p in sorted(plans, key=lambda p: p.step_time):
        kinds.setdefault(
            f"{counted(p.num_stages, 'stage')}, {counted(p.num_microbatches, 'microbatch')}, {p.schedule}", p
        )
    return tuple(
        Considered(name, p.step_time, p.peak_memory, "chosen" if p is best else "") for name, p in kinds.items()
    )


def nothing_planned(problem: Problem, trials: Trials[PipelineTrial, Plan], closed: Sequence[Bounded] = ()) -> Bounded:
    """Message that nothing is faster than the best plan so far.

    Args:
        problem: what was planned.
        trials: what was tried.
        closed: what closed slicings that were not.

    Raises:
        ConstraintError: a constraint where stages were asked for.
        InfeasiblePlanError: the first failure; where nothing was tried, why.
        MicrobatchError: the first failure.
    """
    failures: list[InfeasiblePlanError | MicrobatchError] = [*trials.failures.values(), *trials.impossible.values()]
    if failures:
        cause = failures[0].__cause__
        raise cause if isinstance(cause, ConstraintError) and problem.job.num_stages is not None else failures[0]
    if trials.bounded is not None:
        return trials.bounded
    if closed:
        return closed[0]
    if problem.subproblem.cutoff_s < math.inf:
        return Bounded("no slicing is estimated to be faster")
    loop = _loop_of_passes(problem.graph)
    if loop is not None:
        parts = loop.integer("length") if loop.attr("length") is not None else 2
        raise InfeasiblePlanError(
            f"{problem.graph.name} cannot be cut into stages: its forward and backward passes are inside of a loop",
            cause="a loop of your own over parts of the batch, which adds up gradients",
            remedy=f"the gradient of the whole batch with num_microbatches={parts}, not the loop; or num_stages=1",
            source=loop.source or None,
        )
    times = _times_of_passes(problem.graph)
    if times > 1:
        raise InfeasiblePlanError(
            f"no way to cut {problem.graph.name} into stages fits {problem.cluster.name}: its layers run {times} times",
            cause="a loop of your own over parts of the batch that adds up gradients, or layers that share parameters",
            remedy=f"the gradient of the whole batch with num_microbatches={times}, not the loop; or num_stages=1",
        )
    asked, devices = problem.job.num_stages, problem.cluster.num_devices
    if asked is not None and asked > devices:
        raise InfeasiblePlanError(
            f"{problem.graph.name} cannot be cut into {counted(asked, 'stage')} on the {counted(devices, 'device')} of "
            f"{problem.cluster.name}",
            cause="a device runs several stages only by schedules with chunks, as 'interleaved'",
            remedy=f"num_stages={devices} or fewer, or more devices",
        )
    raise InfeasiblePlanError(
        f"no way to cut {problem.graph.name} into stages fits {problem.cluster.name}",
        cause="too few layers, devices or bytes for the number of stages",
        remedy="fewer stages, more microbatches, or a higher memory_limit",
    )


def _loop_of_passes(graph: Graph) -> Operator | None:
    """The loop that has most of the work of a step, forward and backward passes both; None where there is none."""
    total = sum(total_flops(graph, op) for op in graph.operators)
    for op in graph.operators:
        if op.primitive not in ("scan", "while") or total_flops(graph, op) <= total / 2:
            continue
        phases = {phase_of(inner) for _, region in op.regions for inner in region.operators}
        if {"forward", "backward"} <= phases:
            return op
    return None


def _times_of_passes(graph: Graph) -> int:
    """Forward passes of a step over the same parameters: equal operators that read one. 1 where none do."""
    parameters = {i.name for i in graph.inputs if i.role == "parameter"}
    readers: Counter[tuple[object, ...]] = Counter()
    for op in graph.operators:
        read = tuple(o for o in op.operands if not isinstance(o, Literal) and o in parameters)
        if read and phase_of(op) == "forward":
            readers[(read, op.primitive, repr(op.attrs), graph.operand_types(op))] += 1
    return min(readers.values(), default=1)
