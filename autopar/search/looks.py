"""Looks at all logical meshes before one is solved: bounds that say which are worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.plan.text import bytes_text
from autopar.search.intra import ShardingProblem
from autopar.search.mesh_search import MeshSearch
from autopar.search.problem import Problem
from autopar.solver import Solution, peak_bytes
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


def _order(meshes: MeshSearch) -> list[LogicalMesh]:
    """The meshes, that which is most like the machine first."""
    every = list(enumerate(meshes.meshes))
    return [mesh for _, mesh in sorted(every, key=lambda pair: (_distance(meshes.problem, pair[1]), pair[0]))]


def summed_cutoff_s(meshes: MeshSearch) -> float:
    """Seconds that the sum of an answer must stay below, so that its step stays below ``cutoff_s`` of the sub-problem.

    A step is shorter than the sum of its computation and conversions: some hide behind others, are sent together, or
    are counted for each reader. The share that is left is that of the answer without a limit on the mesh most like the
    machine. It is an estimate, of which no bound is made.
    """
    cutoff_s = meshes.problem.subproblem.cutoff_s
    if cutoff_s == math.inf:
        return cutoff_s
    for sharding_problem in map(meshes.program, _order(meshes)):
        if sharding_problem.broken:
            continue
        look = meshes.free(sharding_problem)
        if look.found and look.objective > 0:
            return cutoff_s * max(1.0, look.objective / meshes.step_s(sharding_problem, look))
    return cutoff_s


def all_looked_at(meshes: MeshSearch, cutoff_s: float = math.inf) -> list[Looked]:
    """A look at every mesh without the memory limit.

    The mesh that is most like the machine comes first; others are looked at no longer once their bound is above
    ``cutoff_s`` or what is known.
    """
    problem, looks, order = meshes.problem, _Looks(meshes, cutoff_s), _order(meshes)
    looked: dict[LogicalMesh, Future[Looked]] = {}
    # Looks run without the interpreter's lock, one after another in a thread, while the next mesh is stated.
    with ThreadPoolExecutor(1, "autopar-look") as thread:
        try:
            for mesh in order:
                problem.checkpoint()
                looked[mesh] = thread.submit(looks.look, meshes.program(mesh))
                if problem.subproblem.ample_memory and mesh == order[0] and looked[mesh].result().bound_s == math.inf:
                    first = looked[mesh].result()  # the least of one mesh is about that of all
                    broken = first.sharding_problem.broken
                    free = None if broken else meshes.look(first.sharding_problem)
                    raise too_little(meshes, [replace(first, solution=free)])
        except BaseException:
            thread.shutdown(cancel_futures=True)
            raise
        return [looked[mesh].result() for mesh in meshes.meshes]


@dataclass
class _Looks:
    """Looks at meshes one after another.

    Args:
        meshes: what is planned.
        cutoff_s: a step of another plan, or of a mesh that was looked at and fits: beyond it a mesh is given up.
    """

    meshes: MeshSearch
    cutoff_s: float

    def look(self, sharding_problem: ShardingProblem) -> Looked:
        """A look at the next mesh."""
        problem = self.meshes.problem
        limit_bytes = problem.memory_limit_bytes
        if sharding_problem.broken or memory_floor(sharding_problem.problem) > limit_bytes:
            return Looked(sharding_problem, None, math.inf)
        look = self.meshes.look(sharding_problem, self.cutoff_s)
        if look is None and problem.subproblem.ample_memory:  # only an answer says whether it is
            answer = self.meshes.unlimited(sharding_problem, None)
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


def too_little(meshes: MeshSearch, looked: Sequence[Looked] = ()) -> MemoryNotAmpleError:
    """Message that memory is not ample: the choice of no mesh without a limit keeps it.

    Args:
        meshes: what is planned.
        looked: looks at its meshes.
    """
    problem = meshes.problem
    choices = [(look.sharding_problem, look.solution) for look in looked if look.solution and look.solution.found]
    estimate_s = None
    if choices:
        estimate_s = meshes.step_s(*min(choices, key=lambda pair: (pair[1].objective, str(pair[0].mesh))))
    limit = bytes_text(problem.memory_limit_bytes)
    return MemoryNotAmpleError(
        f"{problem.graph.name} without a limit does not fit {limit} a device on any mesh", estimate_s
    )


def with_looks_only(problem: Problem, *, any_that_fits: bool = False) -> Problem:
    """A problem of which a look within the limit is the answer; see `Subproblem`."""
    subproblem = replace(problem.subproblem, looks_only=True, any_that_fits=any_that_fits)
    return replace(problem, subproblem=subproblem)
