"""`SeveralStages`: plans of several stages of one step, by a strategy that shards each of them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from autopar.errors import InfeasiblePlanError
from autopar.errors.names import counted
from autopar.ir import Graph
from autopar.ir.analysis import unread_effects
from autopar.plan import Plan
from autopar.search.anytime import Converted
from autopar.search.cache import cached, cached_with_branches, cached_with_stages
from autopar.search.outcome import Bounded
from autopar.search.pipeline.first_pipeline import first_pipeline
from autopar.search.pipeline.search_space import is_large, is_small, may_have_one_loop, stages_of_whole_nodes
from autopar.search.registry import Strategy
from autopar.search.source import LayeredStep
from autopar.search.step_problem import StepProblem
from autopar.search.token_slices import in_slices


class SeveralStages(StepProblem):
    """Plans a step in several stages.

    Each plan raises InfeasiblePlanError where nothing fits, and MicrobatchError where the step cannot be cut into the
    number of microbatches that was asked for.
    """

    def pipeline(self) -> Plan | Bounded:
        """The best pipeline of the stages that the problem asks for, or of any."""
        return self._planned(cached_with_stages(self.strategy, self.cache))

    def even(self) -> Plan | Bounded:
        """Even stages of whole nodes, planned without ranking numbers of stages.

        The middle one of the possible numbers is taken, and the largest where it does not fit. Any number holds as much
        state a device; a larger one takes longer to plan, a smaller one has larger messages inside each stage.

        Raises:
            InfeasiblePlanError: no stages are whole nodes, or nothing fits.
        """
        problem = self.problem
        numbers = [s for s in stages_of_whole_nodes(problem) if may_have_one_loop(problem, s)]
        numbers = numbers or stages_of_whole_nodes(problem)
        if not numbers:
            raise InfeasiblePlanError(f"no stages of {problem.graph.name} are whole nodes of {problem.cluster.name}")
        search = partial(first_pipeline, intra=cached(self.strategy, self.cache))
        *middle, last = dict.fromkeys((numbers[len(numbers) // 2], numbers[-1]))
        for stages in middle:
            with suppress(InfeasiblePlanError):
                return self._even(stages, search)
        return self._even(last, search)

    def _even(self, stages: int, search: Strategy) -> Plan | Bounded:
        subproblem = replace(self.problem.subproblem, tried_stages=(stages,))
        return replace(self, problem=replace(self.problem, subproblem=subproblem))._planned(search, one_loop=True)

    def branches(self) -> Plan | Bounded:
        """The best plan with independent branches side by side."""
        problem = self.problem
        asked = None if problem.subproblem.uniform_stages else problem.job.num_stages  # else it is that of workers
        free = replace(problem, job=replace(problem.job, num_stages=asked))
        return replace(self, problem=free)._planned(cached_with_branches(self.strategy, self.cache))

    def _planned(self, search: Strategy, one_loop: bool = False) -> Plan | Bounded:
        """The plan of a search that cuts stages, of the step with stacks taken apart.

        Each stage has one loop over layers where a finer cut would make no stages that are more even, but for a step
        that has no plan so.

        Args:
            search: cuts stages and plans them.
            one_loop: whether each stage has one in any case.
        """
        problem = self.problem
        problem.log(f"slicing {counted(len(problem.graph.operators), 'operator')} into stages for {problem.cluster}")
        stages = problem.job.num_stages or getattr(self.strategy, "num_stages", None)
        if stages is None and problem.subproblem.tried_stages:
            stages = problem.subproblem.tried_stages[0] * problem.subproblem.stages_per_worker
        one_loop = one_loop or problem.job.offload == "layers"
        if not one_loop and stages is not None and may_have_one_loop(problem, stages):
            layered = self._layered(stages, one_loop=True)
            if not is_small(replace(problem, graph=layered.graph)):
                try:
                    return self._searched(search, layered)
                except InfeasiblePlanError:
                    if problem.subproblem.cutoff_s < math.inf or problem.subproblem.stages_per_worker > 1:
                        raise  # a plan is known, or stages with less in flight may fit
        return self._searched(search, self._layered(stages, one_loop=one_loop))

    def _layered(self, stages: int | None, one_loop: bool) -> LayeredStep:
        """The step with stacks taken apart for so many stages, or for any number where it is None."""
        problem = self.problem
        groups = problem.cluster.num_devices if is_large(problem) else problem.policy.enumeration.most_layers
        return self.step.layered(stages, groups, one_loop=one_loop, block_scores=problem.subproblem.block_scores)

    def _searched(self, search: Strategy, layered: LayeredStep) -> Plan | Bounded:
        """The plan of a search that cuts stages from a step with stacks taken apart."""
        problem, counts = self.problem, self.counts
        job, cluster = problem.job, problem.cluster
        layered_job = replace(
            job,
            donated=layered.donated,
            constraints=layered.constraints,
            shared_stages=layered.shared_stages,
            num_microbatches=None if counts is None else counts[0],
        )
        whole = replace(
            problem,
            graph=layered.graph,
            cost_model=problem.cost_model.on(cluster),
            job=layered_job,
            source=layered.source.metered(problem.meter),
            anytime=None if problem.anytime is None else Converted(problem.anytime, layered.of_step),
        )
        plan = search(whole)
        if isinstance(plan, Bounded):
            return plan
        if note := _left_out(layered.graph):
            plan = replace(plan, content=msgspec.structs.replace(plan.content, notes=(*plan.content.notes, note)))
        if problem.request.token_slices is not None:
            plan = in_slices(whole, layered.graph, plan, problem.request.token_slices)
        return layered.of_step(plan)


def _left_out(graph: Graph) -> str:
    """Operators that stages do not run, as text; "" where they run all."""
    unread = unread_effects(graph)
    if not unread:
        return ""
    lines = ", ".join(dict.fromkeys(op.source or op.id for op in unread))
    return f"stages run what outputs need, no print or callback without a result ({lines}): num_stages=1 runs them"
