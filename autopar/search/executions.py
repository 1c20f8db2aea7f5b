"""The way in which several processes carry a pipeline out: `with_executions` prices both and decides.

Plans for clusters of several nodes get a record of it (`autopar.plan.pipeline.ExecutionPrices`), since each node has
its own processes there. `parallelize(pipeline="auto")` follows it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from autopar.cluster import Cluster
from autopar.cost.executions import RoundWork, StartPrices, priced
from autopar.plan import Plan
from autopar.plan.pipeline import Execution, ExecutionPrices
from autopar.schedule import Apply, Instruction, Program, Recv, Run, Send
from autopar.schedule.memory import held_bytes
from autopar.schedule.rounds import RoundParts, permutes_of, rounds_of
from autopar.schedule.without_flush import flushes, updates_apart
from autopar.search.policy import SchedulePolicy
from autopar.search.problem import Problem
from autopar.simulate.durations import Durations
from autopar.simulate.plans import parts_of, program_of


def with_executions(plan: Plan, problem: Problem) -> Plan:
    """A plan with the prices of both ways, where there are several stages and nodes, and two ways.

    Args:
        plan: the answer of a search.
        problem: it was planned for.
    """
    record = plan.content.pipeline
    if record is None or problem.cluster.num_nodes < 2 or not flushes(plan.schedule) or updates_apart(plan.schedule):
        return plan
    if any(v.host for v in record.values):
        return plan  # one program has no state in host memory
    prices = execution_prices(plan, problem.cluster, problem.policy.schedules)
    if prices is None:
        return plan
    taken, reason = _decided(prices, problem.cluster, plan.content.memory_limit, problem.policy.effort.least_gain)
    executions = msgspec.structs.replace(prices, taken=taken, reason=reason)
    content = msgspec.structs.replace(plan.content, pipeline=msgspec.structs.replace(record, executions=executions))
    return replace(plan, content=content)


def execution_prices(plan: Plan, cluster: Cluster, policy: SchedulePolicy) -> ExecutionPrices | None:
    """Prices of both ways; None where one program would be of too many branches to compile.

    XLA's programs for GPUs read the number of a branch on the host before they start it.

    Args:
        plan: of several stages, by a schedule that flushes.
        cluster: of the plan.
        policy: seconds of starting, and how many branches are too many.
    """
    table = parts_of(plan)[0]
    if sum(map(len, table.rows)) * table.num_workers > policy.most_branches:
        return None
    program, durations = program_of(plan)
    lists = [w.instructions for w in program.workers]
    starts = [sum(isinstance(i, Run | Apply | Send | Recv) for i in line) for line in lists]
    rounds = round_works(program, rounds_of(lists), durations)
    kinds = [kind for d in cluster.device_types for kind in d.jax_kinds]
    branch_s = policy.branch_s if all(k == "cpu" or k.startswith("TPU") for k in kinds) else policy.start_s
    return priced(plan.step_time, plan.peak_memory, starts, rounds, StartPrices(policy.start_s, branch_s))


def round_works(program: Program, rounds: tuple[RoundParts, ...], durations: Durations) -> list[RoundWork]:
    """Seconds and bytes of rounds.

    Args:
        program: whose lists they are of.
        rounds: see `autopar.schedule.rounds.rounds_of`.
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
