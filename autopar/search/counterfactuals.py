"""`SearchedCounterfactuals`: answers of a search about a plan that it made, if one choice is ruled out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import AutoparError
from autopar.plan import Choice, Considered, PlanContent, StepForm
from autopar.plan.counterfactuals import ALTERNATIVE
from autopar.plan.text import bytes_text
from autopar.search.intra import extract
from autopar.search.mesh_search import MeshSearch
from autopar.search.one_stage import OneStagePlanner, problem_in_form
from autopar.search.outcome import within_reach
from autopar.search.problem import Problem
from autopar.search.registry import strategy_named
from autopar.search.source import StepSource
from autopar.solver import with_allowed

#: Plans that people write by hand, against which a plan is shown.
ALTERNATIVES = ("data-parallel", "zero1", "zero2", "zero3", "megatron", "fsdp-tp")


@dataclass(frozen=True, eq=False)
class SearchedCounterfactuals:
    """Step times of a plan if one of its choices is ruled out. Each question is planned once, for one stage.

    Args:
        searched: the step in one microbatch with what was asked for, and in other forms.
        content: of the plan.
    """

    searched: Callable[[], tuple[Problem, StepSource]]
    content: PlanContent

    @cached_property
    def _stage(self) -> Problem:
        """The step as one stage in the form of the plan; of a pipeline with what its first stage recomputes."""
        (problem, step), c = self.searched(), self.content
        form = c.stages[0].form.asked
        if len(c.stages) > 1:
            form = StepForm(
                c.num_microbatches, form.remat, segment_layers=form.segment_layers, block_scores=form.block_scores
            )
        reporting = replace(problem.reporting, explains_infeasible=False)
        return problem_in_form(replace(problem, reporting=reporting), step.in_form(form))

    @cached_property
    def _alternatives(self) -> tuple[Considered, ...]:
        problem, step = self.searched()
        reporting = replace(problem.reporting, explains_infeasible=False)
        # The planner alone pads: see `autopar.api.options.ParallelOptions.form`.
        request, job = replace(problem.request, padding=False), replace(problem.job, num_stages=1)
        problem = replace(problem, request=request, job=job, reporting=reporting)
        return tuple(_alternative(problem, step, self.content.num_microbatches, name) for name in ALTERNATIVES)

    def alternatives(self) -> tuple[Considered, ...]:
        """Plans that people write by hand: those of ``search=NAME`` as one stage in the microbatches of the plan."""
        return self._alternatives

    def without(self, name: str) -> Considered | None:
        """The best plan on the same mesh without what was chosen for ``name``, everything else chosen again.

        The solver stops at the relative gap of plans, and keeps the memory limit.
        """
        choice = next((k for k in self.content.choices if k.name == name), None)
        if choice is None or len(self.content.stages) > 1:
            return None
        return self._without(choice)

    def _without(self, choice: Choice) -> Considered | None:
        problem = self._stage
        sizes = tuple(n for _, n in self.content.stages[0].mesh_axes)
        (mesh,) = problem.cluster.logical_meshes(sizes)
        meshes = MeshSearch(problem)
        program = meshes.program(mesh)
        at = next((n for n, node in enumerate(program.nodes) if node.name == choice.name), None)
        if at is None:
            return None
        labels = [program.nodes[at].label(k) for k in range(program.problem.nodes[at].costs.size)]
        restricted = with_allowed(program.problem, {at: [label != choice.choice for label in labels]})
        if not np.isfinite(restricted.nodes[at].costs).any():
            return Considered("", None, None, "nothing else is possible here")
        solution = meshes.solved(restricted)
        if not solution.found:
            limit = bytes_text(problem.memory_limit_bytes)
            return Considered("", None, None, f"nothing else was found within {limit} a device")
        sharding = extract(problem, program, solution.choice)
        return Considered(program.nodes[at].label(solution.choice[at]), sharding.step_s, sharding.memory.total)


def _alternative(problem: Problem, step: StepSource, count: int, name: str) -> Considered:
    """The plan of a strategy in so many microbatches, or why it has none."""
    try:
        problem.log(f"planning {name}")
        plan = within_reach(OneStagePlanner(problem, step, [count], strategy_named(name)).best())
    except AutoparError as error:
        return Considered(name, None, None, f"{ALTERNATIVE}: {error.fact}")
    return Considered(name, plan.step_time, plan.peak_memory, ALTERNATIVE)
