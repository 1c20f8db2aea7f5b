"""`SearchedCounterfactuals`: answers of a search about a plan that it made, if one choice is ruled out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.errors.names import counted
from autopar.ir import Graph
from autopar.plan import Choice, Considered, PlanContent, StepForm
from autopar.plan.counterfactuals import ALTERNATIVE
from autopar.plan.text import bytes_text
from autopar.search.alpa import alpa
from autopar.search.intra import extract
from autopar.search.mesh_search import MeshSearch
from autopar.search.one_stage import OneStagePlanner, problem_in_form
from autopar.search.outcome import within_reach
from autopar.search.problem import Problem
from autopar.search.registry import strategy_named
from autopar.search.source import FormedStep, StepSource
from autopar.solver import with_allowed

#: Plans that people write by hand, against which a plan is shown.
ALTERNATIVES = ("data-parallel", "zero1", "zero2", "zero3", "megatron", "fsdp-tp")


@dataclass(frozen=True)
class PackedTables:
    """A step whose separate embedding tables are one array, as `autopar.transforms.deal_tables` packs them.

    Args:
        graph: of the step; the packed array has the name of the first table.
        names: of the tables.
    """

    graph: Graph
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SearchedCounterfactuals:
    """Step times of a plan if one of its choices is ruled out. Each question is planned once, for one stage.

    Args:
        searched: the step in one microbatch with what was asked for, and in other forms.
        content: of the plan.
        pack: packs the separate tables of a step for so many devices; None where there are none.
    """

    searched: Callable[[], tuple[Problem, StepSource]]
    content: PlanContent
    pack: Callable[[Graph, int], PackedTables | None] = lambda graph, devices: None

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

    def packed(self) -> Considered | None:
        """The best plan of one stage and one microbatch of the step with its separate tables packed; None without."""
        return self._packed

    @cached_property
    def _packed(self) -> Considered | None:
        problem, _ = self.searched()
        tables = self.pack(problem.graph, problem.cluster.num_devices)
        job = problem.job
        if tables is None or job.shared_stages is not None or {c.value for c in job.constraints} & {*tables.names}:
            return None
        problem.log(f"planning {counted(len(tables.names), 'table')} as one array")
        kept = {i.name for i in tables.graph.inputs}
        job = replace(
            job,
            donated=job.donated & kept,
            constraints=tuple(c for c in job.constraints if c.value in kept),
            offload="none",
        )
        reporting = replace(problem.reporting, explains_infeasible=False)
        problem = replace(problem, job=job, reporting=reporting, source=None)
        name = f"{counted(len(tables.names), 'table')}, from {tables.names[0]} to {tables.names[-1]}"
        try:
            plan = within_reach(alpa(problem_in_form(problem, FormedStep(tables.graph, StepForm()))))
        except InfeasiblePlanError as error:
            return Considered(name, None, None, error.fact)
        return Considered(name, plan.step_time, plan.peak_memory)

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
