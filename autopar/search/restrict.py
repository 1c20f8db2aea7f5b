"""The integer program with some layouts of inputs ruled out: how plans that people name are priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.ir import Input, Layout
from autopar.plan import Considered, Plan
from autopar.search.assemble import assemble
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem, build, extract
from autopar.search.problem import Problem
from autopar.solver import Node, Solution, solve

#: input, its layouts -> for each of them whether a plan may give it that layout
Allowed: TypeAlias = Callable[[Input, Sequence[Layout]], Sequence[bool]]
#: value that an operator makes (with the ids of enclosing operators and regions before its name), layouts -> likewise
AllowedMade: TypeAlias = Callable[[str, Sequence[Layout]], Sequence[bool]]


@dataclass(frozen=True)
class Restricted:
    """A restricted problem with its solution; ``solution.choice`` is empty where nothing fits the memory."""

    stated: ShardingProblem
    solution: Solution


def solve_restricted(
    problem: Problem, mesh: LogicalMesh, allowed: Allowed, clock: Clock, made: AllowedMade | None = None
) -> Restricted:
    """The cheapest sharding on ``mesh`` whose inputs have allowed layouts.

    Args:
        problem: what is planned.
        mesh: where.
        allowed: which layouts an input may have; it must allow one or more.
        clock: takes the time.
        made: which layouts a value may be made in; it must allow one or more. None allows all.
    """
    with clock.phase("program"):
        stated = build(problem, mesh)
        roles = {i.name: i for i in problem.graph.inputs}
        nodes = list(stated.problem.nodes)
        for v in stated.values.values():
            if v.node is None or not (v.source or made):
                continue
            ok = allowed(roles[v.key], v.layouts) if v.source or made is None else made(v.key, v.layouts)
            costs = np.where(ok, nodes[v.node].costs, np.inf)
            if v.source or np.isfinite(costs).any():  # values that follow one node may allow nothing together
                nodes[v.node] = Node(nodes[v.node].name, costs)
    with clock.phase("solve"):
        solution = solve(
            replace(stated.problem, nodes=tuple(nodes)),
            time_limit_s=problem.options.time_limit_s,
            seed=problem.options.seed,
        )
    return Restricted(stated, solution)


def restricted_plan(
    problem: Problem,
    found: Restricted,
    name: str,
    clock: Clock,
    notes: Sequence[str] = (),
    considered: Sequence[Considered] = (),
) -> Plan:
    """The plan of a restricted solution.

    Raises:
        InfeasiblePlanError: nothing fits the memory.
    """
    if not found.solution.found:
        raise InfeasiblePlanError(
            f"{name} does not fit {problem.memory_limit_bytes} bytes a device", remedy="search='alpa', or more memory"
        )
    used, wanted = tuple(n for _, n in found.stated.mesh.axes), problem.options.mesh_shape
    if wanted is not None and used != tuple(wanted):
        shape = "x".join(map(str, wanted))
        notes = (*notes, f"the mesh {shape} that was asked for is not used: {name} has a mesh of its own")
    stated = replace(found.stated, notes=(*found.stated.notes, *notes))
    with clock.phase("extract"):
        sharding = extract(problem, stated, found.solution.choice)
    objective, bound = found.solution.objective, found.solution.lower_bound
    return assemble(problem, stated, sharding, name, objective, bound, tuple(considered), clock)
