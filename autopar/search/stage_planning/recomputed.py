"""Lower bound of recomputation: levels that cost a stage more than its memory limit does are not planned."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost import CostModel
from autopar.plan import PlanContent
from autopar.recompute import Level, Phases, select
from autopar.search.problem import Problem
from autopar.search.stage_planning.stage_problem import PlacedStage
from autopar.search.sure_work import SureWork, sure_works


def cost_of_limit_s(content: PlanContent) -> float:
    """Seconds of a step that the memory limit costs a stage which recomputes nothing, at most.

    They are the difference of two sums of the seconds of operators and messages, before anything is hidden: that of
    the plan, and the least of any without the limit. 0 where the limit has no part in the plan, inf where that is not
    known.

    Args:
        content: the plan of the stage.
    """
    search = content.search
    if not content.memory_bound:
        return 0.0
    sum_s = next((c.step_time for c in search.considered if c.note == "chosen"), None)
    if search.unlimited_s is None or sum_s is None:
        return float("inf")
    return max(0.0, sum_s - search.unlimited_s)


def recomputed_s(placed: PlacedStage, level: Level) -> float:
    """Seconds of a step that a stage computes again at least, about: t(o, D) of what it does not hold, on D devices.

    Operators that go by memory are left out: what the step writes in any case may stay in a kernel where it is made
    again.
    m microbatches take m t(o, m D) >= t(o, D) for it, for time by the number of parts does not fall.

    Args:
        placed: the stage on its devices.
        level: what is recomputed.
    """
    pipeline = placed.pipeline
    problem, first = pipeline.problem, pipeline.first(placed.stage)
    if type(problem.cost_model) is not CostModel:
        return 0.0
    key = problem.store.key(
        "recomputed",
        problem.graph,
        problem.cost_model,
        pipeline.members[first],
        pipeline.table.num_microbatches,
        pipeline.layers,
        placed.part,
        level,
    )
    return problem.store.once(key, lambda: _recomputed_s(replace(placed, stage=first), level))


def _recomputed_s(placed: PlacedStage, level: Level) -> float:
    pipeline, stage, cost = placed.pipeline, placed.stage, placed.cost_model
    problem, parts = pipeline.problem, pipeline.sliced.parts[stage]
    phases = Phases.of(problem.graph, parts.body, parts.backward)
    selected = select(problem.graph, phases, pipeline.layers_of(stage), level)
    again = {id for group in selected.groups for id in group.operators}
    devices = placed.part.num_devices
    return sum(w.runs * cost.least_s(w.least, devices) for w in _works(problem) if _is_in(w.id, again))


def _works(problem: Problem) -> tuple[SureWork, ...]:
    """Sure work of the graph that computation binds."""
    graph, cost, blocks = problem.graph, problem.cost_model, problem.subproblem.block_scores
    key = problem.store.key("sure work", graph, cost, blocks)
    return problem.store.once(
        key, lambda: tuple(w for w in sure_works(graph, cost, blocks) if w.least.flops > w.least.bytes)
    )


def _is_in(id: str, operators: set[str]) -> bool:
    """Whether an operator, whose id follows those of the loops that it is in, is one of ``operators`` or in one."""
    while id:
        if id in operators:
            return True
        id = id.rpartition("/")[0]
    return False
