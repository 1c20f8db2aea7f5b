"""`SeveralStages`: plans of several stages of one step, by a strategy that shards each of them."""

from __future__ import annotations

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
from autopar.search.pipeline.search_space import is_large, stages_of_whole_nodes
from autopar.search.registry import Strategy
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
        """Even stages of as few whole nodes as may be, planned without ranking numbers of stages.

        Raises:
            InfeasiblePlanError: no stages are whole nodes, or nothing fits.
        """
        problem = self.problem
        stages = stages_of_whole_nodes(problem)[-1:]
        if not stages:
            raise InfeasiblePlanError(f"no stages of {problem.graph.name} are whole nodes of {problem.cluster.name}")
        subproblem = replace(problem.subproblem, tried_stages=tuple(stages))
        search = partial(first_pipeline, intra=cached(self.strategy, self.cache))
        even = replace(self, problem=replace(problem, subproblem=subproblem))
        return even._planned(search, one_loop=True)

    def branches(self) -> Plan | Bounded:
        """The best plan with independent branches side by side."""
        problem = self.problem
        asked = None if problem.subproblem.uniform_stages else problem.job.num_stages  # else it is that of workers
        free = replace(problem, job=replace(problem.job, num_stages=asked))
        return replace(self, problem=free)._planned(cached_with_branches(self.strategy, self.cache))

    def _planned(self, search: Strategy, one_loop: bool = False) -> Plan | Bounded:
        """The plan of a search that cuts stages, of the step with stacks taken apart, for one loop a stage if asked."""
        problem, counts = self.problem, self.counts
        job, cluster = problem.job, problem.cluster
        problem.log(f"slicing {counted(len(problem.graph.operators), 'operator')} into stages for {cluster}")
        stages = job.num_stages or getattr(self.strategy, "num_stages", None)
        if stages is None and problem.subproblem.tried_stages:
            stages = problem.subproblem.tried_stages[0] * problem.subproblem.stages_per_worker
        most = problem.policy.enumeration
        groups = cluster.num_devices if is_large(problem) else most.most_layers
        scores, loop = problem.subproblem.block_scores, one_loop or job.offload == "layers"
        layered = self.step.layered(stages, groups, one_loop=loop, block_scores=scores)
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
