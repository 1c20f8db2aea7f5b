"""The default strategy: the integer program on every logical mesh, the best of the answers (Alpa, OSDI'22)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.plan import Considered, Plan
from autopar.plan.text import bytes_text
from autopar.search.assemble import assemble
from autopar.search.clock import Clock
from autopar.search.constraints import meshes_that_hold
from autopar.search.intra import ShardingProblem, build, extract
from autopar.search.intra.host import least_device_memory
from autopar.search.problem import NotFasterError, Problem
from autopar.solver import ChoiceProblem, Solution, Status, peak_bytes, solve
from autopar.solver.goal import PLAN_GAP, Goal
from autopar.solver.memory import memory_floor


@dataclass(frozen=True)
class Answer:
    """A mesh with its stated problem and solution; ``solution.choice`` is empty where nothing fits.

    ``note`` says under which restriction, beside the mesh.
    """

    stated: ShardingProblem
    solution: Solution
    note: str = ""


def alpa(problem: Problem) -> Plan:
    """The cheapest plan over all logical meshes of the cluster.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit; it has the least memory that would do.
    """
    clock = Clock()
    free = _all_without_limit(problem, clock)
    answers = [answer for answer in free if not answer.stated.memory_bound]
    best = min((answer.solution.objective for answer in answers), default=math.inf)
    # Each phase having copies of its own takes no less at any time, so what no choice fits is not stated so too.
    hopeless = [answer for answer in free if answer.solution.status is Status.INFEASIBLE]
    open_yet = [answer for answer in free if answer.solution.status is not Status.INFEASIBLE]
    cheapest = min((answer.solution.lower_bound for answer in open_yet), default=math.inf)
    if open_yet and cheapest >= problem.subproblem.cutoff_s:
        raise _no_better(problem, cheapest)
    answers += hopeless
    short = [answer for answer in open_yet if answer.stated.memory_bound]
    # The least bound first: what its mesh costs is then often less than what the others would cost without a limit.
    for answer in sorted(short, key=lambda a: (a.solution.lower_bound, str(a.stated.mesh))):
        if answer.solution.lower_bound > min(best, problem.subproblem.cutoff_s):
            left_out = replace(answer.solution, status=Status.UNKNOWN, choice=(), objective=math.inf)
            answers.append(replace(answer, solution=left_out, note="left out: its bound is above what is known"))
            continue
        found = _under_limit(problem, answer, clock, min(best, problem.subproblem.cutoff_s))
        answers += found
        best = min([best, *(a.solution.objective for a in found)])
    if short and not any(answer.solution.found for answer in answers) and cheapest < problem.subproblem.cutoff_s:
        useless = [a.solution.lower_bound for a in answers if a.solution.lower_bound >= problem.subproblem.cutoff_s]
        if any(map(math.isfinite, useless)):
            raise _no_better(problem, min(useless))
    order = [str(answer.stated.mesh) for answer in free]
    plan = best_plan(problem, sorted(answers, key=lambda a: order.index(str(a.stated.mesh))), "alpa", clock)
    if not plan.content.memory_bound or hopeless:
        return plan
    search = msgspec.structs.replace(plan.content.search, unlimited_s=cheapest)
    return Plan(msgspec.structs.replace(plan.content, search=search), plan.phases)


def _all_without_limit(problem: Problem, clock: Clock) -> list[Answer]:
    """Answers on all meshes without the memory limit.

    The mesh that is most like the machine comes first; others are given up once their bound is above what is known.
    """
    every = problem.cluster.logical_meshes(problem.options.mesh_shape)
    meshes = meshes_that_hold(every, problem.graph, problem.options.constraints)
    likely = sorted(range(len(meshes)), key=lambda i: (_distance(problem, meshes[i]), i))
    answers: dict[int, Answer] = {}
    best = problem.subproblem.cutoff_s
    for i in likely:
        answers[i] = _without_limit(problem, meshes[i], clock, best)
        if not answers[i].stated.memory_bound and answers[i].solution.found:
            best = min(best, answers[i].solution.objective)
    return [answers[i] for i in range(len(meshes))]


def _distance(problem: Problem, mesh: LogicalMesh) -> float:
    """How far the sizes of a mesh are from nodes by devices of a node."""
    node = max(group.devices_per_node for group in problem.cluster.groups)
    inner = mesh.axes[-1][1] if len(mesh.axes) > 1 or problem.cluster.num_devices <= node else 1
    return abs(math.log2(inner / min(node, problem.cluster.num_devices)))


def _without_limit(problem: Problem, mesh: LogicalMesh, clock: Clock, cutoff_s: float) -> Answer:
    """The answer on one mesh without the memory limit; ``memory_bound`` where it breaks the limit, or was given up.

    Args:
        problem: what is planned.
        mesh: where.
        clock: takes the time.
        cutoff_s: a step of another mesh, or one that another plan takes: beyond it the mesh is given up.
    """
    stated = _stated(problem, mesh, clock, split_phases=False)
    if stated.broken or memory_floor(stated.problem) > problem.memory_limit_bytes:
        return Answer(replace(stated, memory_bound=True), Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, ""))
    with clock.phase("solve"):
        free = _solve(problem, replace(stated.problem, limit_bytes=None), cutoff_s=cutoff_s)
    given_up = free.status is not Status.OPTIMAL and free.lower_bound > cutoff_s
    fits = free.found and not given_up and peak_bytes(stated.problem, free.choice) <= problem.memory_limit_bytes
    return Answer(stated if fits else replace(stated, memory_bound=True), free)


def _under_limit(problem: Problem, free: Answer, clock: Clock, cutoff_s: float) -> list[Answer]:
    """Answers within the limit: with copies that all phases share, and with copies of each phase's own.

    The second cost no less than the first without a limit, for they are made more often; where the first within the
    limit costs next to nothing more than that, they are not tried. Separate programs have the second alone.
    """
    found: list[Answer] = []
    if not problem.subproblem.separate_programs:
        with clock.phase("solve"):
            shared = _solve(problem, free.stated.problem, binds=True, cutoff_s=cutoff_s)
            found.append(Answer(free.stated, shared, "memory binds"))
        least = free.solution.lower_bound
        if found[0].solution.objective <= least + problem.policy.stages.negligible_cost * abs(least):
            return found
    split = _stated(problem, free.stated.mesh, clock, split_phases=True)
    with clock.phase("solve"):
        own = _solve(problem, split.problem, binds=True)
    return [*found, Answer(replace(split, memory_bound=True), own, "memory binds, each phase gathers anew")]


def _no_better(problem: Problem, cheapest_s: float) -> NotFasterError:
    return NotFasterError(
        f"no plan of {problem.graph.name} takes less than {problem.subproblem.cutoff_s} s; the fastest, without a "
        f"limit, takes {cheapest_s} s",
        cause="another plan is at hand that is as fast",
        remedy="take that plan, or leave cutoff_s out",
    )


def _stated(problem: Problem, mesh: LogicalMesh, clock: Clock, *, split_phases: bool) -> ShardingProblem:
    with clock.phase("program"):
        return build(problem, mesh, split_phases=split_phases)


def _solve(problem: Problem, stated: ChoiceProblem, *, binds: bool = False, cutoff_s: float = math.inf) -> Solution:
    """The cheapest choice, up to a gap that no plan is worth waiting for."""
    limit_s, seed = problem.options.time_limit_s, problem.options.seed
    return solve(stated, time_limit_s=limit_s, seed=seed, binds=binds, goal=Goal(PLAN_GAP, cutoff_s))


def best_plan(problem: Problem, answers: Sequence[Answer], name: str, clock: Clock) -> Plan:
    """The plan of the cheapest answer.

    Raises:
        InfeasiblePlanError: none of them has a choice.
    """
    if not any(a.solution.found for a in answers):
        raise infeasible(problem, [a.stated for a in answers])
    with clock.phase("extract"):
        shardings = [extract(problem, a.stated, a.solution.choice) if a.solution.found else None for a in answers]
        # Where copies are priced for each phase some of them are found to be one: what is left is what counts.
        _, _, best, chosen = min(
            (
                (s.compute_s + s.communication_s + s.host_s, str(a.stated.mesh), a, s)
                for a, s in zip(answers, shardings, strict=True)
                if s is not None
            ),
            key=lambda found: found[:2],
        )
        considered = tuple(
            Considered(
                f"mesh {a.stated.mesh}" + (f", {a.note}" if a.note else ""),
                a.solution.objective if a.solution.found else None,
                None if sharding is None else sharding.memory.total,
                "chosen" if a is best else a.solution.status.value,
            )
            for a, sharding in zip(answers, shardings, strict=True)
        )
        bound = min(a.solution.lower_bound for a in answers)
    return assemble(
        problem,
        best.stated,
        chosen,
        name,
        best.solution.objective,
        None if math.isinf(bound) else float(bound),
        considered,
        clock,
    )


def infeasible(problem: Problem, stated: Sequence[ShardingProblem]) -> InfeasiblePlanError:
    """The error that says how much memory would do, or a bound of it."""
    limit = problem.memory_limit_bytes
    floors = sorted(((memory_floor(s.problem), s) for s in stated), key=lambda p: p[0])
    least, told = max(floors[0][0], limit + 1.0), "it needs more"
    if problem.reporting.explains_infeasible:
        least = math.inf
        for floor, s in floors:
            if floor < least:
                least = min(least, least_device_memory(s.problem, s.usages))
        told = f"the least that would do is {bytes_text(least)} ({math.ceil(least)} bytes)"
    return InfeasiblePlanError(
        f"{problem.graph.name} does not fit {bytes_text(limit)} a device on {problem.cluster.name}; {told}",
        cause="parameters, optimizer state and activations, split over all devices, need more than the limit",
        remedy="raise memory_limit, use more devices, a smaller batch, donate_argnums for the state, jax.checkpoint, "
        "or offload='auto' where the cluster gives host_bandwidth",
        least_bytes=math.ceil(least),
    )
