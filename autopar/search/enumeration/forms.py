"""Forms of a plan: one stage, pipelines, branches side by side. The order in which they are planned, and what the
planned ones say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.ir.analysis import unread_effects
from autopar.plan import Plan
from autopar.schedule import factory_named
from autopar.schedule.branches import Branches
from autopar.search.enumeration.search_space import is_large
from autopar.search.enumeration.side_by_side import has_branches
from autopar.search.looks import MemoryNotAmpleError
from autopar.search.problem import Problem


@dataclass(frozen=True)
class Form:
    """A form of a plan.

    Args:
        is_pipeline: whether it has several stages.
        ample_memory: whether, of one stage, only the first configuration is planned, and only where memory is ample.
        has_branches: whether its stages are independent branches side by side.
        is_even: whether its stages are even and nothing is compared, for a plan within seconds.
    """

    is_pipeline: bool
    ample_memory: bool = False
    has_branches: bool = False
    is_even: bool = False

    @property
    def name(self) -> str:
        """The form in words, as rows of the trail have it."""
        return "branches" if self.has_branches else "pipeline" if self.is_pipeline else "one stage"


ONE_STAGE = Form(is_pipeline=False)
AMPLE_STAGE = Form(is_pipeline=False, ample_memory=True)
PIPELINES = Form(is_pipeline=True)
BRANCHES = Form(is_pipeline=True, has_branches=True)
EVEN_STAGES = Form(is_pipeline=True, is_even=True)


def forms(problem: Problem, *, cuts_stages: bool, tries_pipelines: bool) -> tuple[Form, ...]:
    """The forms that are planned, in order.

    Inside a node one stage is the likelier answer, and pipelines are tried where they may be faster. Between nodes
    a pipeline is, unless one stage has ample memory: else it takes longer to plan without a plan to beat. Even stages
    come first on many nodes, whose meshes take longer to look at, and on a large cluster where memory is not ample.
    A mesh that is asked for and has all devices is the mesh of one stage. Where the number of stages and the schedule
    are free, independent branches of the step are put side by side on parts of the devices: before pipelines, which
    take longer to plan, and last on a large cluster, where estimates leave out pipelines that are near a plan at hand.
    Stages run what outputs need: a step that prints has several where they are asked for, or one does not fit.

    Args:
        problem: what is planned.
        cuts_stages: whether the strategy cuts steps into stages itself.
        tries_pipelines: whether pipelines are planned next to one stage where the number of stages is free.
    """
    asked, devices = problem.options.num_stages, problem.cluster.num_devices
    if asks_for_branches(problem.options.schedule):
        return (BRANCHES,)
    if (asked or 1) > 1 or (asked is None and devices > 1 and cuts_stages):
        return (PIPELINES,)
    if asked is not None or not tries_pipelines or devices == 1:
        return (ONE_STAGE,)
    schedule = problem.options.schedule
    if schedule not in ("auto", "none"):
        return (PIPELINES, ONE_STAGE)
    if unread_effects(problem.graph):
        return (ONE_STAGE, PIPELINES)
    if problem.options.mesh_shape is not None and math.prod(problem.options.mesh_shape) == devices:
        return (ONE_STAGE,)
    branches = (BRANCHES,) if schedule == "auto" and has_branches(problem) else ()
    if schedule == "auto" and problem.cluster.num_nodes > 1:
        even = (EVEN_STAGES,) if is_large(problem) and not cuts_stages else ()
        if problem.cluster.num_nodes > problem.policy.sizes.many_nodes:
            return (*even, AMPLE_STAGE, PIPELINES, ONE_STAGE, *branches)
        if even:
            return (AMPLE_STAGE, *even, PIPELINES, ONE_STAGE, *branches)
        return (AMPLE_STAGE, *branches, PIPELINES, ONE_STAGE)
    return (ONE_STAGE, *branches, PIPELINES)


def forms_on_workers(problem: Problem, *, tries_branches: bool) -> tuple[Form, ...]:
    """The forms of several stages, or of one on one worker, that workers in other processes carry out, in order.

    Args:
        problem: what is planned.
        tries_branches: whether branches are planned next to pipelines where the stages are as many as there are
            workers because nobody said how many.
    """
    if asks_for_branches(problem.options.schedule):
        return (BRANCHES,)
    free = problem.subproblem.uniform_stages and problem.options.schedule == "auto"
    free = free and problem.options.token_slices is None
    several = free and tries_branches and problem.cluster.num_nodes > 1
    return (PIPELINES, BRANCHES) if several and has_branches(problem) else (PIPELINES,)


def asks_for_branches(schedule: Any) -> bool:
    """Whether a schedule that was asked for is that of branches side by side."""
    if isinstance(schedule, str):
        return schedule not in ("auto", "none") and factory_named(schedule) is Branches
    return isinstance(schedule, Branches)


@dataclass(frozen=True)
class Tried:
    """What the forms that were planned so far say.

    Args:
        best: the fastest plan; None before there is one.
        one_stage: the last plan of one stage; None before there is one.
        failures: why forms have no plan, that of one stage first.
        one_stage_is_slower: whether one stage takes longer than the best plan, however much memory there is.
        one_stage_s: seconds of one stage whose memory is not ample, if it were; None where that is not known.
    """

    best: Plan | None = None
    one_stage: Plan | None = None
    failures: tuple[InfeasiblePlanError | MicrobatchError, ...] = ()
    one_stage_is_slower: bool = False
    one_stage_s: float | None = None

    @property
    def cutoff_s(self) -> float:
        """Seconds that a plan must stay below to be of use."""
        return math.inf if self.best is None else self.best.step_time

    @property
    def exposed(self) -> float:
        """Part of the seconds of computing and sending that the plan of one stage does not hide; 1 without one.

        Without a plan of one stage it is that of the stage of the best plan that hides most.
        """
        stages = () if self.best is None else self.best.content.parts
        contents = stages if self.one_stage is None else (self.one_stage.content,)
        return min((1.0, *(c.step_time / c.search.objective for c in contents if c.search.objective)))

    def planned(self, form: Form, plan: Plan, least_gain: float) -> Tried:
        """With the plan of a form.

        Args:
            form: of the plan.
            plan: what was planned.
            least_gain: share of the seconds of a plan of one stage that pipelines must save to be taken.
        """
        gains = form.is_pipeline and self.best is not None and self.best.num_stages == 1
        best = plan if self.best is None or plan.step_time < self.cutoff_s * (1 - gains * least_gain) else self.best
        return replace(self, best=best, one_stage=self.one_stage if form.is_pipeline else plan)

    def failed(self, form: Form, error: InfeasiblePlanError | MicrobatchError) -> Tried:
        """With the failure of a form."""
        failures = (*self.failures, error) if form.is_pipeline else (error, *self.failures)
        one_stage_s = error.estimate_s if isinstance(error, MemoryNotAmpleError) else self.one_stage_s
        return replace(self, failures=failures, one_stage_s=one_stage_s)

    def closed(self, form: Form) -> Tried:
        """With a form that is no faster than the best plan."""
        return replace(self, one_stage_is_slower=self.one_stage_is_slower or form == AMPLE_STAGE)

    def ordered(self, left: Sequence[Form], several_s: Callable[[], float], gap: float) -> tuple[Form, ...]:
        """Forms that are left, one stage first where its estimate is less than that of all others.

        Args:
            left: forms in their order.
            several_s: seconds that no plan of several stages is below.
            gap: share of their step that such plans exceed that by, at least.
        """
        free = self.best is None and ONE_STAGE in left and self.one_stage_s is not None
        if free and self.one_stage_s is not None and several_s() >= (1 - gap) * self.one_stage_s:
            return (ONE_STAGE, *(form for form in left if form != ONE_STAGE))
        return tuple(left)
