"""The integer program with some layouts of inputs ruled out: how plans that people name are priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.ir import Input, Layout
from autopar.plan import Considered, Plan, SearchContent
from autopar.plan.text import bytes_text
from autopar.search.assemble import step_bound_s
from autopar.search.clock import Clock
from autopar.search.constraints import meshes_that_hold
from autopar.search.intra import ShardingProblem, extract
from autopar.search.mesh_search import MeshSearch
from autopar.search.problem import Problem
from autopar.solver import Solution, with_allowed

#: input, its layouts -> for each of them whether a plan may give it that layout
Allowed: TypeAlias = Callable[[Input, Sequence[Layout]], Sequence[bool]]
#: value that an operator makes (with the ids of enclosing operators and regions before its name), layouts -> likewise
AllowedResults: TypeAlias = Callable[[str, Sequence[Layout]], Sequence[bool]]


@dataclass(frozen=True)
class Restricted:
    """A restricted problem with its solution; ``solution.choice`` is empty where nothing fits the memory."""

    sharding_problem: ShardingProblem
    solution: Solution


def solve_restricted(
    problem: Problem, mesh: LogicalMesh, allowed: Allowed, clock: Clock, allowed_on_demand: AllowedResults | None = None
) -> Restricted:
    """The cheapest sharding on ``mesh`` whose inputs have allowed layouts.

    Args:
        problem: what is planned.
        mesh: where.
        allowed: which layouts an input may have; it must allow one or more.
        clock: takes the time.
        allowed_on_demand: which layouts a value may be made in; it must allow one or more. None allows all.

    Raises:
        ConstraintError: the mesh does not hold all constraints.
    """
    meshes_that_hold((mesh,), problem.graph, problem.job.constraints)
    meshes = MeshSearch(problem, clock)
    sharding_problem = meshes.program(mesh)
    roles, choices = {i.name: i for i in problem.graph.inputs}, sharding_problem.problem
    left: dict[int, NDArray[np.bool_]] = {}
    for v in sharding_problem.values.values():
        if v.node is None or not (v.source or allowed_on_demand):
            continue
        ok = (
            allowed(roles[v.source], v.layouts)
            if v.source or allowed_on_demand is None
            else allowed_on_demand(v.key, v.layouts)
        )
        both = left.get(v.node, np.isfinite(choices.nodes[v.node].costs)) & np.asarray(ok, bool)
        if v.source or both.any():
            left[v.node] = both  # values that follow one node may allow nothing together
    return Restricted(sharding_problem, meshes.solved(with_allowed(choices, left), gap=0.0))


def restricted_plan(
    problem: Problem,
    restricted: Restricted,
    name: str,
    clock: Clock,
    notes: Sequence[str] = (),
    considered: Sequence[Considered] = (),
) -> Plan:
    """The plan of a restricted solution.

    Raises:
        InfeasiblePlanError: nothing fits the memory.
    """
    if not restricted.solution.found:
        raise InfeasiblePlanError(
            f"{name} does not fit {bytes_text(problem.memory_limit_bytes)} a device",
            remedy="search='alpa', or more memory",
        )
    used, wanted = tuple(n for _, n in restricted.sharding_problem.mesh.axes), problem.job.mesh_shape
    if wanted is not None and used != tuple(wanted):
        shape = "x".join(map(str, wanted))
        notes = (*notes, f"the mesh {shape} that was asked for is not used: {name} has a mesh of its own")
    sharding_problem = replace(restricted.sharding_problem, notes=(*restricted.sharding_problem.notes, *notes))
    with clock.phase("extract"):
        sharding = extract(problem, sharding_problem, restricted.solution.choice)
    bound = step_bound_s(problem, sharding_problem, restricted.solution.lower_bound)
    search = SearchContent(name, restricted.solution.objective, bound, tuple(considered))
    return MeshSearch(problem, clock).assembled(sharding_problem, restricted.solution.choice, sharding, search)
