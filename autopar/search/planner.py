"""`plan_step`: the whole decision, from a step and a cluster to one plan.

`autopar.search.decision` says which regions there are, and `autopar.search.loop` closes them, best first, until none is
left that may have a faster plan. `with_executions` prices both ways in which several processes carry a pipeline out,
and decides: plans for clusters of several nodes get a record of it (`autopar.plan.pipeline.ExecutionPrices`), since
each node has its own processes there. `parallelize(pipeline="auto")` follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from autopar.cluster import Cluster
from autopar.cost import StartPrices
from autopar.cost.executions import RoundWork, priced
from autopar.plan import Plan
from autopar.plan.pipeline import Execution, ExecutionPrices
from autopar.schedule import Apply, Instruction, Program, Recv, Run, Send
from autopar.schedule.memory import held_bytes
from autopar.schedule.rounds import RoundParts, permutes_of, rounds_of
from autopar.schedule.without_flush.schedules import flushes, updates_stagewise
from autopar.search.anytime import Incumbent, SearchEndedError
from autopar.search.clock import Clock, units
from autopar.search.decision import Decision
from autopar.search.loop import Regions, explored
from autopar.search.outcome import LeftOut, Planned
from autopar.search.pipeline.search_space import is_large
from autopar.search.problem import Problem
from autopar.search.registry import cuts_stages
from autopar.search.trail import Region, Trail
from autopar.search.worker_pool import WorkerPool
from autopar.simulate.durations import Durations
from autopar.simulate.plans import parts_of, program_of
from autopar.solver.meter import Meter

#: Phase of the seconds that no phase of the plan has.
OTHER_ATTEMPTS = "other attempts"


def plan_step(decision: Decision, *, tries_pipelines: bool = True, time_limit_s: float | None = None) -> Plan:
    """The fastest plan of a step.

    A search that its time limit or Ctrl-C ends returns the best plan known, with a note; it ends only then.

    Args:
        decision: what is free of the plan.
        tries_pipelines: whether stages are cut where their number is free and the strategy does not cut them itself.
        time_limit_s: seconds of searching after which the best plan known is the answer; None waits.

    Raises:
        InfeasiblePlanError: nothing fits the memory; the error is that of one stage where one was tried.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    problem = decision.problem
    incumbent, meter, trail = Incumbent.within(time_limit_s, problem.policy.effort.budget), Meter(), Trail()
    reporting = problem.reporting
    if reporting.log is not None:
        reporting = replace(reporting, log=incumbent.telling(reporting.log))
    try:
        with WorkerPool(may_begin=True) as pool:
            watched = replace(problem, anytime=incumbent, reporting=reporting, meter=meter, trail=trail, pool=pool)
            regions = partial(replace(decision, problem=watched).regions, tries_pipelines=tries_pipelines)
            best = incumbent.fastest(_timed(watched, regions), problem.policy.effort.least_gain)
    except (SearchEndedError, KeyboardInterrupt) as ended:
        known = incumbent.cut_short(ended.cause if isinstance(ended, SearchEndedError) else "Ctrl-C")
        if known is None:
            raise
        best = known
    return replace(_searched(best, decision, meter, trail), incumbents=tuple(incumbent.history))


def plan_on_workers(decision: Decision) -> Plan:
    """The fastest plan whose stages run on workers, each in a process of its own; errors as of `plan_step`."""
    meter, trail = Meter(), Trail()
    with WorkerPool(may_begin=True) as pool:
        counted = replace(decision.problem, meter=meter, trail=trail, pool=pool)
        best = _timed(counted, replace(decision, problem=counted).on_workers)
    return _searched(best, decision, meter, trail)


def _timed(problem: Problem, regions: Callable[[], Regions]) -> Plan:
    """The fastest plan, whose phases have the seconds of what it did not take: ranking, bounds, plans that lost."""
    clock = Clock()
    with clock.phase(OTHER_ATTEMPTS):
        plan = fastest(problem, regions())
    return replace(plan, phases=clock.rest(OTHER_ATTEMPTS, plan.phases))


def fastest(problem: Problem, regions: Regions) -> Plan:
    """The fastest plan of some regions; the record of one with several stages has the others.

    Args:
        problem: whose decision the regions are of.
        regions: sets of plans.

    Raises:
        InfeasiblePlanError: nothing fits the memory.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    known = explored(problem, regions)
    best = known.best
    assert best is not None
    if best.num_stages == 1 or not known.others:
        return best
    search = best.content.search
    beaten = [msgspec.structs.replace(c, note="") for plan in known.others for c in plan.content.search.considered]
    considered = sorted((*search.considered, *beaten), key=lambda c: (c.step_time is None, c.step_time or 0.0, c.name))
    search = msgspec.structs.replace(search, considered=tuple(considered))
    return replace(best, content=msgspec.structs.replace(best.content, search=search))


def _searched(plan: Plan, decision: Decision, meter: Meter, trail: Trail) -> Plan:
    """A plan with the work units and the trail of its search."""
    problem = decision.problem
    meter.merge(decision.step.meter)
    devices, asked = problem.cluster.num_devices, problem.job.num_stages
    rule = _rule(problem) if asked is None else f"num_stages={asked} is asked for"
    if asked is None and cuts_stages(decision.strategy):
        rule = f"{plan.search.strategy} says the number of stages"
        region = Region.of_stages("one stage" if plan.num_stages == 1 else "pipeline", [plan.num_stages])
        if plan.num_stages not in trail.covered():
            trail.close(region, Planned(plan.step_time))
    known = trail.covered()
    if others := [n for n in range(1, devices + 1) if n not in known]:
        trail.close(Region.of_stages("pipeline", others), LeftOut(rule))
    details = msgspec.structs.replace(plan.details, work=units(meter), trail=trail.table())
    return with_executions(replace(plan, details=details), problem)


def _rule(problem: Problem) -> str:
    """Why numbers of stages are left out of which nothing else tells, in words."""
    if is_large(problem):
        return "on so many nodes stages are whole nodes with nearly equal shares of the layers"
    return "more stages than parts that can be cut, or no even share of the devices"


def with_executions(plan: Plan, problem: Problem) -> Plan:
    """A pipeline's plan with the prices of running it as one XLA program, or as many that hosts start.

    Plans of one stage, of one node or of a schedule that only one of them runs stay as they are.

    Args:
        plan: the answer of a search.
        problem: it was planned for.
    """
    record = plan.content.pipeline
    if (
        record is None
        or problem.cluster.num_nodes < 2
        or not flushes(plan.schedule)
        or updates_stagewise(plan.schedule)
    ):
        return plan
    if any(v.host for v in record.values):
        return plan  # one program has no state in host memory
    prices = execution_prices(plan, problem.cluster, problem.cost_model.starts)
    if prices is None:
        return plan
    taken, reason = _decided(prices, problem.cluster, plan.content.memory_limit, problem.policy.effort.least_gain)
    executions = msgspec.structs.replace(prices, taken=taken, reason=reason)
    content = msgspec.structs.replace(plan.content, pipeline=msgspec.structs.replace(record, executions=executions))
    return replace(plan, content=content)


def execution_prices(plan: Plan, cluster: Cluster, starts: StartPrices) -> ExecutionPrices | None:
    """Prices of a pipeline as one XLA program, and as a program for each task that the host starts.

    None where one program has too many branches to compile: one for each task of each worker. XLA's programs for GPUs
    read the number of a branch on the host before they start it.

    Args:
        plan: of several stages, by a schedule that flushes.
        cluster: of the plan.
        starts: seconds to start a program or a branch, and how many branches are too many.
    """
    table = parts_of(plan)[0]
    if sum(map(len, table.rows)) * table.num_workers > starts.most_branches:
        return None
    program, durations = program_of(plan)
    lists = [w.instructions for w in program.workers]
    started = [sum(isinstance(i, Run | Apply | Send | Recv) for i in line) for line in lists]
    rounds = round_works(program, rounds_of(lists), durations)
    kinds = [kind for d in cluster.device_types for kind in d.jax_kinds]
    if not all(k == "cpu" or k.startswith("TPU") for k in kinds):
        starts = replace(starts, branch_s=starts.start_s)
    return priced(plan.step_time, plan.peak_memory, started, rounds, starts)


def round_works(program: Program, rounds: tuple[RoundParts, ...], durations: Durations) -> list[RoundWork]:
    """Seconds and bytes of rounds.

    Args:
        program: whose lists they are of.
        rounds: what each worker does between two exchanges of all workers, in order.
        durations: seconds of works and transfers.
    """
    workers = range(len(program.workers))
    held = [held_bytes(program, w, [parts[w] for parts in rounds]) for w in workers]
    works = []
    for number, parts in enumerate(rounds):
        messages = [
            (worker, i.to, "", durations.of_transfer(i.value.value, worker, i.to))
            for worker, turn in enumerate(parts)
            for i in turn
            if isinstance(i, Send)
        ]
        permutes = tuple(tuple(seconds for _, _, seconds in group) for group in permutes_of(messages))
        busy = tuple(_busy_s(turn, durations) for turn in parts)
        works.append(RoundWork(busy, permutes, tuple(held[w][number] for w in workers)))
    return works


def _busy_s(turn: tuple[Instruction, ...], durations: Durations) -> float:
    return float(sum(durations.of_work(i.work) for i in turn if isinstance(i, Run | Apply)))


def is_one_slice(cluster: Cluster) -> bool:
    """Whether all devices are TPUs of one slice, whose processes form one group."""
    tpus = all(any(kind.startswith("TPU") for kind in d.jax_kinds) for d in cluster.device_types)
    return tpus and len(cluster.groups) == 1 and not cluster.has_slower_network


def _decided(prices: ExecutionPrices, cluster: Cluster, limit_bytes: int, least_gain: float) -> tuple[Execution, str]:
    """The way that "auto" takes, and why."""
    if not is_one_slice(cluster):
        return "lists", "one program is for one slice of TPUs, or asked for by name"
    if limit_bytes and prices.one_program.memory_bytes > limit_bytes:
        return "lists", "one program exceeds the memory limit"
    if prices.one_program.step_s < (1 - least_gain) * prices.lists.step_s:
        return "one_program", "it is predicted to be faster"
    return "lists", "one program is not predicted to be faster"
