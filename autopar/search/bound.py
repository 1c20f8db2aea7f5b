"""Bounds of plans: what no plan of a step beats, however it is sliced, sharded, scheduled and recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from autopar.cost import CostModel, least_latency_s
from autopar.ir import Graph
from autopar.ir.analysis import unread_effects
from autopar.microbatch import batch_size
from autopar.plan import Plan
from autopar.search.bounds.pipelines import BoundedStep, least_of_all_s, microbatches_of
from autopar.search.bounds.workers import Workers, workers_of
from autopar.search.critical_path import in_every_microbatch
from autopar.search.problem import Problem
from autopar.search.sure_work import sure_works
from autopar.search.techniques.attention_blocks import block_scores


@dataclass(frozen=True)
class Freedom:
    """Over which plans a bound holds.

    Args:
        one_stage: whether plans of one stage are among them.
        most_stages: stages that others have at most, workers of them at most as many; 0 where there are none.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        updates_on_hosts: whether hosts may compute the update.
        is_synchronous: whether, of several stages, those that take what others make wait for it in every step: for
            all of a microbatch at once, with nothing that steps before have left.
        microbatches: their number; None for any.
        sends: whether a stage is on one worker, or on two that share the microbatches, as by all schedules that may be
            tried where none is named; by tables of users it may be on any number.
    """

    one_stage: bool = True
    most_stages: int = 0
    block_scores: int = 0
    updates_on_hosts: bool = False
    is_synchronous: bool = True
    microbatches: int | None = None
    sends: bool = False

    @staticmethod
    def of(problem: Problem) -> Freedom:
        """The freedom that a problem leaves: `autopar.search.decision`."""
        job, devices, asked = problem.job, problem.cluster.num_devices, problem.job.num_stages
        on_one_mesh = job.mesh_shape is not None and math.prod(job.mesh_shape) == devices
        on_one_mesh = on_one_mesh and job.schedule in ("auto", "none") and not unread_effects(problem.graph)
        several = 0 if devices == 1 or on_one_mesh else devices
        count, size = job.num_microbatches, batch_size(problem.graph)
        return Freedom(
            one_stage=asked is None or asked == 1,
            most_stages=several if asked is None else asked if asked > 1 else 0,
            block_scores=block_scores(problem),
            updates_on_hosts=job.offload in ("auto", "update"),
            is_synchronous=not problem.names_pipeline,
            # The last batch of a data set may be smaller, and take another number.
            microbatches=count if count is not None and size and size % count == 0 else None,
            sends=job.schedule in ("auto", "none"),
        )


def bounded(plan: Plan, problem: Problem, freedom: Freedom) -> Plan:
    """A plan, of one stage or of several, where more than its sharding was free, with a bound over all of it.

    What the integer program proves of one stage is over shardings in one number of microbatches, with what one level
    of recomputation holds: it becomes ``sharding_bound``.

    Args:
        plan: its search has the bound of the integer program; None of several stages.
        problem: the step, in one microbatch, and all devices.
        freedom: over which plans the bound holds.
    """
    search = plan.content.search
    whole_s = min(bound_s(problem, freedom), plan.step_time)
    search = msgspec.structs.replace(search, lower_bound=whole_s, sharding_bound=search.lower_bound)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def bound_s(problem: Problem, freedom: Freedom) -> float:
    """`work_bound_s` of a problem, computed once in a search.

    Args:
        problem: the step, in one microbatch, and all devices.
        freedom: over which plans it holds.
    """
    graph, cost = problem.graph, problem.cost_model
    key = problem.store.key("bound", graph, cost, freedom)
    return problem.store.once(key, lambda: work_bound_s(graph, cost, freedom))


def work_bound_s(graph: Graph, cost: CostModel, freedom: Freedom | None = None) -> float:
    """Seconds that no plan of a step is below, however it is sliced, sharded, scheduled and recomputed.

    One stage is one worker that has all D devices; stages are on W workers that have k each. Of all numbers of workers
    and of microbatches that are free the least holds (`autopar.search.bounds.pipelines` has the formulas). In one stage
    each device does a part of every operator, of a D-th at least, one after the other. What counts as an operator's
    work is sure in any plan (`sure_work`). Of one of m microbatches the operators of a chain run one after another, on
    whatever devices (`critical_path`): the bubble of few microbatches; with what they send from worker to worker.
    Where devices differ the best of any is taken for all. Other communication, recomputation and other waiting only add
    to it. Prices of other classes than `CostModel` may be anything: of them nothing is known.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cost: what things cost on all devices.
        freedom: over which plans it holds.
    """
    if type(cost) is not CostModel:
        return 0.0
    devices = cost.cluster.num_devices
    freedom = freedom or Freedom(most_stages=devices)
    counts = list(microbatches_of(freedom.microbatches, batch_size(graph) or 1))
    works = [
        work
        for work in sure_works(graph, cost, freedom.block_scores, in_stages=freedom.most_stages > 0)
        if not (freedom.updates_on_hosts and work.phase == "update")
    ]
    bounds = [math.inf]
    if freedom.one_stage:
        fewest = counts[0][0]
        every = in_every_microbatch(graph, fewest) if fewest > 1 else frozenset[str]()
        bounds.append(
            least_of_all_s(BoundedStep(graph, cost, works, every), [Workers(1, devices, devices)], counts[:1])
        )
    if freedom.most_stages:
        every = in_every_microbatch(graph, counts[-1][1])
        some = workers_of(cost.cluster, min(devices, freedom.most_stages))
        latency_s = least_latency_s(cost.cluster) if freedom.sends else 0.0
        is_synchronous = freedom.is_synchronous
        step = BoundedStep(graph, cost, works, every)
        bounds.append(least_of_all_s(step, some, counts, is_synchronous=is_synchronous, latency_s=latency_s))
    least_s = min(bounds)
    return least_s if math.isfinite(least_s) else 0.0
