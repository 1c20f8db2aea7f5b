"""Bounds of all logical meshes before one is solved: which are worth it, and in which order.

Solving a mesh within the memory limit takes seconds, its Lagrangian relaxation a part of one. Relaxations without the
limit come first. Where the best meshes break it, relaxations within the limit say which mesh is solved first, and the
bounds of the others then exceed what is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.plan.text import bytes_text
from autopar.search.intra import ShardingProblem, extract
from autopar.search.mesh_search import MeshSearch
from autopar.search.problem import Problem
from autopar.solver import Solution, peak_bytes, solve_relaxed
from autopar.solver.goal import Goal
from autopar.solver.memory import memory_floor


@dataclass(frozen=True)
class RelaxedMesh:
    """A mesh with its integer program, and the program's relaxation without the memory limit.

    ``bound_s`` is less than any step without a limit takes, -inf where a proof takes as long as a relaxation, and
    ``solution`` then None unless memory must be ample. ``fits`` says whether the choice of the relaxation keeps the
    limit; where nothing does the bound is inf.
    """

    sharding_problem: ShardingProblem
    solution: Solution | None
    bound_s: float
    fits: bool = False


def _order(meshes: MeshSearch) -> list[LogicalMesh]:
    """The meshes, that which is most like the machine first."""
    every = list(enumerate(meshes.meshes))
    return [mesh for _, mesh in sorted(every, key=lambda pair: (_distance(meshes.problem, pair[1]), pair[0]))]


def summed_cutoff_s(meshes: MeshSearch) -> float:
    """Cutoff for the sum of seconds of a choice, from the cutoff for its step (``cutoff_s`` of the sub-problem).

    A step is shorter than the sum of its computation and conversions: some overlap with others, are sent together, or
    are counted for each reader. The ratio of the two is taken from the choice without a memory limit on the mesh most
    like the machine. It is an estimate, of which no bound is made.
    """
    cutoff_s = meshes.problem.subproblem.cutoff_s
    if cutoff_s == math.inf:
        return cutoff_s
    for sharding_problem in map(meshes.program, _order(meshes)):
        if sharding_problem.broken:
            continue
        relaxed = meshes.free(sharding_problem)
        if relaxed.found and relaxed.objective > 0:
            return cutoff_s * max(1.0, relaxed.objective / meshes.step_s(sharding_problem, relaxed))
    return cutoff_s


def all_relaxed(meshes: MeshSearch, cutoff_s: float = math.inf) -> list[RelaxedMesh]:
    """Relaxations of every mesh without the memory limit.

    The mesh that is most like the machine comes first; others are relaxed no longer once their bound is above what is
    near ``cutoff_s`` or what is known (`MeshSearch.near_s`).
    """
    problem, relaxations, order = meshes.problem, _Relaxations(meshes, cutoff_s), _order(meshes)
    relaxed_meshes: dict[LogicalMesh, Future[RelaxedMesh]] = {}
    # Relaxations run without the interpreter's lock, one after another in a thread, while the next mesh is stated.
    with ThreadPoolExecutor(1, "autopar-relaxation") as thread:
        try:
            for mesh in order:
                problem.checkpoint()
                sharding_problem = meshes.program(mesh)
                if mesh == order[0] and not problem.subproblem.ample_memory:
                    meshes.check_room(sharding_problem)
                relaxed_meshes[mesh] = thread.submit(relaxations.relaxed, sharding_problem)
                if (
                    problem.subproblem.ample_memory
                    and mesh == order[0]
                    and relaxed_meshes[mesh].result().bound_s == math.inf
                ):
                    first = relaxed_meshes[mesh].result()  # the least of one mesh is about that of all
                    broken = first.sharding_problem.broken
                    free = None if broken else meshes.relaxed(first.sharding_problem)
                    raise too_little(meshes, [replace(first, solution=free)])
        except BaseException:
            thread.shutdown(cancel_futures=True)
            raise
        return [relaxed_meshes[mesh].result() for mesh in meshes.meshes]


@dataclass
class _Relaxations:
    """Relaxes meshes one after another.

    Args:
        meshes: what is planned.
        cutoff_s: a step of another plan, or of a mesh that was relaxed and fits: beyond it a mesh is given up.
    """

    meshes: MeshSearch
    cutoff_s: float

    def relaxed(self, sharding_problem: ShardingProblem) -> RelaxedMesh:
        """The relaxation of the next mesh."""
        problem = self.meshes.problem
        limit_bytes = problem.memory_limit_bytes
        if sharding_problem.broken or memory_floor(sharding_problem.problem) > limit_bytes:
            return RelaxedMesh(sharding_problem, None, math.inf)
        relaxed = self.meshes.relaxed(sharding_problem, self.meshes.near_s(self.cutoff_s))
        if relaxed is None and problem.subproblem.ample_memory:  # only an answer says whether it is
            answer = self.meshes.unlimited(sharding_problem, None)
            fits = answer.found and peak_bytes(sharding_problem.problem, answer.choice) <= limit_bytes
            return RelaxedMesh(sharding_problem, answer, -math.inf, fits)
        if relaxed is None:
            return RelaxedMesh(sharding_problem, None, -math.inf)
        fits = relaxed.found and peak_bytes(sharding_problem.problem, relaxed.choice) <= limit_bytes
        if fits:
            self.cutoff_s = min(self.cutoff_s, relaxed.objective)
        return RelaxedMesh(sharding_problem, relaxed, relaxed.lower_bound, fits)


def _distance(problem: Problem, mesh: LogicalMesh) -> float:
    """Distance of the sizes of a mesh from nodes by devices of a node."""
    node = max(group.devices_per_node for group in problem.cluster.groups)
    inner = mesh.axes[-1][1] if len(mesh.axes) > 1 or problem.cluster.num_devices <= node else 1
    return abs(math.log2(inner / min(node, problem.cluster.num_devices)))


class MemoryNotAmpleError(InfeasiblePlanError):
    """The cheapest choice without a memory limit keeps the limit on no mesh.

    Args:
        fact: what does not fit.
        estimate_s: seconds of the fastest of these choices; None where no mesh was relaxed.
    """

    def __init__(self, fact: str, estimate_s: float | None = None) -> None:
        super().__init__(fact)
        self.estimate_s = estimate_s


def too_little(meshes: MeshSearch, relaxed_meshes: Sequence[RelaxedMesh] = ()) -> MemoryNotAmpleError:
    """Message that memory is not ample: the choice of no mesh without a limit keeps it.

    Args:
        meshes: what is planned.
        relaxed_meshes: its meshes.
    """
    problem = meshes.problem
    choices = [
        (relaxed.sharding_problem, relaxed.solution)
        for relaxed in relaxed_meshes
        if relaxed.solution and relaxed.solution.found
    ]
    estimate_s = None
    if choices:
        estimate_s = meshes.step_s(*min(choices, key=lambda pair: (pair[1].objective, str(pair[0].mesh))))
    limit = bytes_text(problem.memory_limit_bytes)
    return MemoryNotAmpleError(
        f"{problem.graph.name} without a limit does not fit {limit} a device on any mesh", estimate_s
    )


def with_relaxation_only(problem: Problem, *, any_that_fits: bool = False) -> Problem:
    """A problem whose answer may be a relaxation's choice within the memory limit, without a proof."""
    subproblem = replace(problem.subproblem, relaxation_only=True, any_that_fits=any_that_fits)
    return replace(problem, subproblem=subproblem)


@dataclass(frozen=True)
class LimitRelaxations:
    """Relaxations of one mesh's integer program within the memory limit, in up to two formulations.

    A copy is a value in another layout, as a gathered parameter. In the shared formulation all phases (forward pass,
    backward pass, update) read one copy; in the split one each phase makes its own, and gives it up sooner.

    Args:
        shared: relaxation of the shared formulation; None where to prove it takes as long as to solve it.
        split: the integer program of the split formulation; None where it has no use.
        split_relaxed: relaxation of the split formulation.
        times_joined: factor, 1 or more, on the seconds of a choice in which equal collectives of several phases are
            sent
            once: an estimate by which meshes are compared. inf where there is no relaxation.
    """

    shared: Solution | None
    split: ShardingProblem | None = None
    split_relaxed: Solution | None = None
    times_joined: float = math.inf

    def forms(self, shared: ShardingProblem) -> tuple[tuple[ShardingProblem, Solution | None], ...]:
        """Problems of the mesh, of which ``shared`` has copies that all phases share, with their relaxations."""
        split = () if self.split is None else ((self.split, self.split_relaxed),)
        return ((shared, self.shared), *split)

    @property
    def cost_s(self) -> float:
        """Seconds of the cheapest choice within the memory limit that this mesh's relaxations have; inf without one."""
        return min(
            (relaxed.objective for relaxed in (self.shared, self.split_relaxed) if relaxed and relaxed.found),
            default=math.inf,
        )

    @property
    def bound_s(self) -> float:
        """No choice within the limit costs less, as copies are priced; -inf where that is not known."""
        if self.shared is None or (self.split is not None and self.split_relaxed is None):
            return -math.inf
        return min(self.shared.lower_bound, math.inf if self.split_relaxed is None else self.split_relaxed.lower_bound)

    def is_useless(self, best_s: float, known_s: float) -> bool:
        """Whether neither form takes less than the best answer of another mesh, nor than a known plan."""
        if self.shared is None or self.shared.lower_bound <= min(best_s, known_s):
            return False
        if self.split is None:
            return True
        most_s = min(known_s, self.times_joined * best_s)
        return self.split_relaxed is not None and self.split_relaxed.lower_bound > most_s


def relaxation_within_limit(
    meshes: MeshSearch, shared: ShardingProblem, *, least_s: float, best_s: float, known_s: float
) -> LimitRelaxations:
    """Relaxes a mesh within the limit.

    Args:
        meshes: what is planned.
        shared: the problem of the mesh.
        least_s: no choice without the limit costs less: copies of each phase's own are relaxed where the limit costs
            something.
        best_s: seconds of the best answer of another mesh.
        known_s: seconds of a plan that is at hand.
    """
    problem, effort = meshes.problem, meshes.problem.policy.effort
    relaxed = meshes.within(shared, least_s, min(best_s, known_s))
    negligible_s = least_s + effort.gap * abs(least_s)
    if relaxed is None or relaxed.objective <= negligible_s or problem.subproblem.separate_programs:
        return LimitRelaxations(relaxed)
    split = meshes.program(shared.mesh, split_phases=True)
    with meshes.clock.phase("solve"):
        split_relaxed = solve_relaxed(split.problem, Goal(effort.sharding_gap, known_s))
    return LimitRelaxations(relaxed, split, split_relaxed, _times_joined(problem, split, split_relaxed))


def _times_joined(problem: Problem, split: ShardingProblem, relaxed: Solution | None) -> float:
    if relaxed is None or not relaxed.found:
        return math.inf
    sharding = extract(problem, split, relaxed.choice)
    seconds = sharding.compute_s + sharding.communication_s + sharding.host_s + sharding.starts_s
    return max(1.0, relaxed.objective / seconds) if seconds > 0 else 1.0


def relaxations_within_limit(
    meshes: MeshSearch,
    relaxed_meshes: Sequence[RelaxedMesh],
    known_s: float,
    offer: Callable[[ShardingProblem, Solution | None], None],
) -> dict[int, LimitRelaxations]:
    """Relaxations within the limit, by number of the mesh; none where no two meshes need one.

    Args:
        meshes: what is planned.
        relaxed_meshes: the meshes without a limit.
        known_s: seconds of a plan that is at hand.
        offer: takes each choice that is the cheapest so far.
    """
    best_s = min(
        (relaxed.solution.objective for relaxed in relaxed_meshes if relaxed.fits and relaxed.solution),
        default=math.inf,
    )
    most_s = min(best_s, known_s)
    short = [
        i
        for i, relaxed in enumerate(relaxed_meshes)
        if not relaxed.fits and math.isfinite(relaxed.bound_s) and relaxed.bound_s <= most_s
    ]
    relaxations: dict[int, LimitRelaxations] = {}
    for i in sorted(short, key=lambda i: (relaxed_meshes[i].bound_s, i)) if len(short) > 1 else ():
        if relaxed_meshes[i].bound_s > best_s:
            continue
        meshes.problem.checkpoint()
        shared = replace(relaxed_meshes[i].sharding_problem, memory_bound=True)
        relaxations[i] = relaxation_within_limit(
            meshes, shared, least_s=relaxed_meshes[i].bound_s, best_s=best_s, known_s=known_s
        )
        if relaxations[i].cost_s < best_s:
            best_s = relaxations[i].cost_s
            for of, relaxed in relaxations[i].forms(shared):
                offer(of, relaxed)
    return relaxations
