"""`Decision`: the regions of the whole decision, and how each is expanded by the loop (`autopar.search.loop`).

    one stage        relaxations of its meshes without a limit: its plan where memory is ample, else microbatches,
                     recomputation and the host (`autopar.search.one_stage`)
    several stages   pipelines by their number, and independent branches side by side on parts of the devices
                     (`autopar.search.stage_regions`)

What the user asked for leaves regions out. It prices nothing and solves nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.errors import InfeasiblePlanError
from autopar.ir.analysis import unread_effects
from autopar.plan import StepForm
from autopar.schedule import factory_named
from autopar.schedule.branches import Branches
from autopar.search.bound import least_of
from autopar.search.loop import Expansion, Known, OpenRegion, Relaxation
from autopar.search.mesh_bounds import MemoryNotAmpleError
from autopar.search.one_stage import OneStagePlanner, is_best_of_one_stage
from autopar.search.outcome import Bounded, LeftOut
from autopar.search.pipeline.branches import has_branches
from autopar.search.pipeline.search_space import is_large
from autopar.search.pipeline.whole_steps import EqualStages, counts_that_may_fit, equal_stages
from autopar.search.registry import cuts_stages, names_one_stage
from autopar.search.stage_regions import StageRegions, by_work, numbers_of
from autopar.search.step_problem import StepProblem
from autopar.search.trail import Region

#: Name of a relaxation, as the trail has it.
MESH_RELAXATIONS = "relaxations of meshes of all devices, an estimate"


def asks_for_branches(schedule: Any) -> bool:
    """Whether a schedule that was asked for is that of branches side by side."""
    if isinstance(schedule, str):
        return schedule not in ("auto", "none") and factory_named(schedule) is Branches
    return isinstance(schedule, Branches)


class Decision(StepProblem):
    """Enumerates the regions (sets of plans) of one problem, which the search plans or closes."""

    def regions(self, *, tries_pipelines: bool) -> tuple[OpenRegion, ...]:
        """All regions that may be planned: one stage, pipelines, branches side by side.

        A mesh that is asked for and has all devices is the mesh of one stage. Stages run what outputs need: a step that
        prints has several where they are asked for, or one does not fit.

        Args:
            tries_pipelines: whether pipelines are planned next to one stage where the number of stages is free.
        """
        problem, job, devices = self.problem, self.problem.job, self.problem.cluster.num_devices
        if asks_for_branches(job.schedule):
            return (self.several.branches(),)
        if (job.num_stages or 1) > 1 or (job.num_stages is None and devices > 1 and cuts_stages(self.strategy)):
            return (self.several.pipelines(),)
        tries_pipelines = tries_pipelines and not names_one_stage(self.strategy)
        if job.num_stages is not None or not tries_pipelines or devices == 1:
            return (self._exact_stage(),)
        if job.schedule not in ("auto", "none"):
            return (self.several.pipelines(), self._exact_stage(by_work()))
        if unread_effects(problem.graph):
            return (self._one_stage(), self.several.pipelines(LeftOut("stages would leave out what the step prints")))
        if job.mesh_shape is not None and math.prod(job.mesh_shape) == devices:
            return (self._exact_stage(),)
        state = self.state_too_large(with_gradients=True)  # passes and update of a stage are programs of their own
        if state is not None:  # one stage says how much memory would do
            problem.trail.close(Region("pipeline", numbers_of(problem, None)), state)
            return (self._exact_stage(),)
        several: tuple[OpenRegion, ...] = (self.several.pipelines(self.several.without_overlap()),)
        if job.schedule == "auto" and has_branches(problem):
            several = (*several, self.several.branches())
        if job.schedule == "auto" and is_large(problem):
            return (self._one_stage(), self.several.even(), *several)
        return (self._one_stage(), *several)

    def on_workers(self) -> tuple[OpenRegion, ...]:
        """Regions of plans that workers in other processes can run: several stages, or one on one worker.

        Branches are planned next to pipelines where the stages are as many as there are workers because nobody said how
        many.
        """
        problem = self.problem
        if asks_for_branches(problem.job.schedule):
            return (self.several.branches(),)
        free = problem.subproblem.uniform_stages and problem.job.schedule == "auto"
        free = free and problem.request.token_slices is None and problem.cluster.num_nodes > 1
        free = free and not cuts_stages(self.strategy) and not names_one_stage(self.strategy)
        pipelines = self.several.pipelines()
        return (pipelines, self.several.branches()) if free and has_branches(problem) else (pipelines,)

    # One stage.

    def _one_stage(self) -> OpenRegion:
        """One stage before any relaxation: planned at once where memory is ample."""

        def expand(known: Known) -> Expansion | Bounded:
            try:
                plan = self._one.ample(known.best_s)
            except InfeasiblePlanError as error:
                seconds = error.estimate_s if isinstance(error, MemoryNotAmpleError) else None
                seconds = seconds or 0.0
                region = self._exact_stage(self._mesh_relaxations, seconds)
                return Expansion(regions=(replace(region, expand=partial(self._by_microbatches, seconds)),))
            if isinstance(plan, Bounded):
                return plan
            if is_best_of_one_stage(self.problem, plan):
                return Expansion(plan)
            return Expansion(plan, (self._exact_stage(self._mesh_relaxations, 0.0),))

        return OpenRegion(Region("one stage", ((1, 1),)), expand)

    def _by_microbatches(self, seconds: float, known: Known) -> Expansion | Bounded:
        """One stage by relaxations: in the fewest microbatches that may fit without recomputation, and in segments.

        To compute layers again may take less than as many microbatches as may keep what they store.
        """
        possible = self.possible_counts
        count = counts_that_may_fit(self.problem, self.step, possible)[0] if len(possible) > 1 else possible[0]
        if count == possible[0]:
            return Expansion(regions=(self._exact_stage(self._mesh_relaxations, seconds),))
        cutoff_s = known.best_s
        estimates = []
        for form in (StepForm(count), *self._one.segmented(possible[0])):
            equal = equal_stages(self.problem, self.step, EqualStages.of(self.problem, 1), form, cutoff_s)
            if equal is not None and not equal.is_beyond:
                cutoff_s = equal.busy_s(form.microbatches)
            if equal is not None:
                estimates.append(equal)
        if estimates and all(equal.is_beyond for equal in estimates):
            return Bounded(MESH_RELAXATIONS, known.best_s)
        seconds = min((e.busy_s(e.estimates[0][0]) for e in estimates if not e.is_beyond), default=seconds)
        return Expansion(regions=(self._exact_stage(self._mesh_relaxations, seconds),))

    def _exact_stage(self, relaxation: Relaxation | None = None, seconds: float = 0.0) -> OpenRegion:
        """One stage in any microbatches, with any recomputation; what a relaxation says of it."""

        def expand(known: Known) -> Expansion | Bounded:
            plan = self._one.best(known.best_s)
            return plan if isinstance(plan, Bounded) else Expansion(plan)

        region = Region("one stage", ((1, 1),))
        if relaxation is None:
            return OpenRegion(region, expand)
        least_s = least_of(self.problem, several=False)
        return OpenRegion(region, expand, relaxation, least_s, max(least_s, seconds))

    @property
    def _mesh_relaxations(self) -> Relaxation:
        return Relaxation(MESH_RELAXATIONS, self.problem.policy.effort.mesh_spread)

    @property
    def _one(self) -> OneStagePlanner:
        return OneStagePlanner(self.problem, self.step, self.counts, self.strategy, self.cache)

    @property
    def several(self) -> StageRegions:
        """Regions of plans with several stages."""
        return StageRegions(self.problem, self.step, self.counts, self.strategy, self.cache)
