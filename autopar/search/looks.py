"""Looks at all logical meshes before one is solved: bounds that say which are worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.plan.text import bytes_text
from autopar.search.built import sharding_problem_of, unlimited_look
from autopar.search.clock import Clock
from autopar.search.constraints import meshes_that_hold
from autopar.search.intra import ShardingProblem, extract
from autopar.search.intra.slack import step_s
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem, HighsSolver, Solution, peak_bytes, solve
from autopar.solver.goal import PLAN_GAP, Goal
from autopar.solver.memory import memory_floor


@dataclass(frozen=True)
class Looked:
    """A mesh with its stated problem and what a look at it without the memory limit says.

    ``bound_s`` is less than any step without a limit takes, -inf where a proof takes as long as a look, and
    ``solution`` then None unless memory must be ample. ``fits`` says whether the choice of the look keeps the limit;
    where nothing does the bound is inf.
    """

    sharding_problem: ShardingProblem
    solution: Solution | None
    bound_s: float
    fits: bool = False


def meshes_of(problem: Problem) -> tuple[LogicalMesh, ...]:
    """The meshes that may be taken."""
    every = problem.cluster.logical_meshes(problem.job.mesh_shape)
    return meshes_that_hold(every, problem.graph, problem.job.constraints)


def _order(problem: Problem, meshes: Sequence[LogicalMesh]) -> list[int]:
    """Numbers of the meshes, that of the one most like the machine first."""
    return sorted(range(len(meshes)), key=lambda i: (_distance(problem, meshes[i]), i))


def summed_cutoff_s(problem: Problem, meshes: Sequence[LogicalMesh], clock: Clock) -> float:
    """Seconds that the sum of an answer must stay below, so that its step stays below ``cutoff_s`` of the sub-problem.

    A step is shorter than the sum of its computation and conversions: some hide behind others, are sent together, or
    are counted for each reader. The share that is left is that of the answer without a limit on the mesh most like the
    machine. It is an estimate, of which no bound is made.
    """
    cutoff_s = problem.subproblem.cutoff_s
    if cutoff_s == math.inf:
        return cutoff_s
    for i in _order(problem, meshes):
        sharding_problem = sharding_problem_of(problem, meshes[i], clock, split_phases=False)
        if sharding_problem.broken:
            continue
        with clock.phase("solve"):
            look = unlimited_look(problem, sharding_problem, math.inf)
            if look is None:
                look = solve_mesh(problem, replace(sharding_problem.problem, limit_bytes=None))
        if look.found and look.objective > 0:
            with clock.phase("extract"):
                step = step_s(extract(problem, sharding_problem, look.choice))
            return cutoff_s * max(1.0, look.objective / step)
    return cutoff_s


def all_looked_at(problem: Problem, meshes: Sequence[LogicalMesh], cutoff_s: float, clock: Clock) -> list[Looked]:
    """A look at every mesh without the memory limit.

    The mesh that is most like the machine comes first; others are looked at no longer once their bound is above
    ``cutoff_s`` or what is known.
    """
    looks, order = _Looks(problem, clock, cutoff_s), _order(problem, meshes)
    looked: dict[int, Future[Looked]] = {}
    # Looks run without the interpreter's lock, one after another in a thread, while the next mesh is stated.
    with ThreadPoolExecutor(1, "autopar-look") as thread:
        try:
            for i in order:
                problem.checkpoint()
                looked[i] = thread.submit(
                    looks.look, sharding_problem_of(problem, meshes[i], clock, split_phases=False)
                )
                if problem.subproblem.ample_memory and i == order[0] and looked[i].result().bound_s == math.inf:
                    first = looked[i].result()  # the least of one mesh is about that of all
                    free = (
                        None
                        if first.sharding_problem.broken
                        else unlimited_look(problem, first.sharding_problem, math.inf)
                    )
                    raise too_little(problem, [replace(first, solution=free)])
        except BaseException:
            thread.shutdown(cancel_futures=True)
            raise
        return [looked[i].result() for i in range(len(meshes))]


@dataclass
class _Looks:
    """Looks at meshes one after another.

    Args:
        problem: what is planned.
        clock: takes the time.
        cutoff_s: a step of another plan, or of a mesh that was looked at and fits: beyond it a mesh is given up.
    """

    problem: Problem
    clock: Clock
    cutoff_s: float

    def look(self, sharding_problem: ShardingProblem) -> Looked:
        """A look at the next mesh."""
        limit_bytes = self.problem.memory_limit_bytes
        if sharding_problem.broken or memory_floor(sharding_problem.problem) > limit_bytes:
            return Looked(sharding_problem, None, math.inf)
        with self.clock.phase("solve"):
            look = unlimited_look(self.problem, sharding_problem, self.cutoff_s)
            if look is None and self.problem.subproblem.ample_memory:  # only an answer says whether it is
                answer = solve_mesh(self.problem, replace(sharding_problem.problem, limit_bytes=None))
                fits = answer.found and peak_bytes(sharding_problem.problem, answer.choice) <= limit_bytes
                return Looked(sharding_problem, answer, -math.inf, fits)
        if look is None:
            return Looked(sharding_problem, None, -math.inf)
        fits = look.found and peak_bytes(sharding_problem.problem, look.choice) <= limit_bytes
        if fits:
            self.cutoff_s = min(self.cutoff_s, look.objective)
        return Looked(sharding_problem, look, look.lower_bound, fits)


def _distance(problem: Problem, mesh: LogicalMesh) -> float:
    """Distance of the sizes of a mesh from nodes by devices of a node."""
    node = max(group.devices_per_node for group in problem.cluster.groups)
    inner = mesh.axes[-1][1] if len(mesh.axes) > 1 or problem.cluster.num_devices <= node else 1
    return abs(math.log2(inner / min(node, problem.cluster.num_devices)))


class MemoryNotAmpleError(InfeasiblePlanError):
    """The cheapest choice without a memory limit keeps the limit on no mesh.

    Args:
        fact: what does not fit.
        estimate_s: seconds of the fastest of these choices; None where no mesh was looked at.
    """

    def __init__(self, fact: str, estimate_s: float | None = None) -> None:
        super().__init__(fact)
        self.estimate_s = estimate_s


def too_little(problem: Problem, looked: Sequence[Looked] = ()) -> MemoryNotAmpleError:
    """Message that memory is not ample: the choice of no mesh without a limit keeps it.

    Args:
        problem: what is planned.
        looked: looks at its meshes.
    """
    choices = [(look.sharding_problem, look.solution) for look in looked if look.solution and look.solution.found]
    estimate_s = None
    if choices:
        sharding_problem, least = min(choices, key=lambda pair: (pair[1].objective, str(pair[0].mesh)))
        estimate_s = step_s(extract(problem, sharding_problem, least.choice))
    limit = bytes_text(problem.memory_limit_bytes)
    return MemoryNotAmpleError(
        f"{problem.graph.name} without a limit does not fit {limit} a device on any mesh", estimate_s
    )


def solve_mesh(
    problem: Problem,
    choices: ChoiceProblem,
    *,
    known: Solution | None = None,
    binds: bool = False,
    cutoff_s: float = math.inf,
    gap: float = PLAN_GAP,
) -> Solution:
    """The cheapest choice, up to a gap that no plan is worth waiting for.

    Args:
        problem: what is planned.
        choices: the problem of a mesh.
        known: what a look at it found.
        binds: whether its memory limit is known to bind.
        cutoff_s: seconds from which it is of no use.
        gap: relative gap between cost and bound that is small enough.
    """
    return solve(
        choices,
        HighsSolver(max_nodes=problem.policy.meshes.most_nodes),
        time_limit_s=problem.solving.time_limit_s,
        seed=problem.solving.seed,
        known=known,
        binds=binds,
        goal=Goal(gap, cutoff_s, alone=problem.is_alone),
    )


def with_looks_only(problem: Problem) -> Problem:
    """A problem of which a look within the limit is the answer."""
    return replace(problem, policy=replace(problem.policy, meshes=replace(problem.policy.meshes, looks_only=True)))
