"""Plans that people write by hand, as restrictions of the same problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasiblePlanError
from autopar.ir import Input, Layout
from autopar.plan import Plan
from autopar.search.assemble import assemble
from autopar.search.clock import Clock
from autopar.search.intra import build, extract
from autopar.search.problem import Problem
from autopar.solver import Node, solve

#: input, its layout -> whether a plan may give it that layout
Allowed = Callable[[Input, Layout], bool]


def data_parallel(problem: Problem) -> Plan:
    """Batch split over all devices on its first dim, everything else whole.

    Raises:
        InfeasiblePlanError: the number of devices does not divide the first dim of a batch argument.
    """
    n = problem.cluster.num_devices
    for i in problem.graph.inputs:
        if i.role == "batch" and i.type.rank and i.type.shape[0] % n:
            sizes = f"{i.type.shape[0] // n * n} or {(i.type.shape[0] // n + 1) * n}"
            raise InfeasiblePlanError(
                f"{i.name} {i.type} has a first dim of {i.type.shape[0]}, which {n} devices do not divide",
                cause="data parallelism gives each device the same number of examples",
                remedy=f"a batch of {sizes}, another number of devices, or search='alpa'",
            )

    def allowed(i: Input, layout: Layout) -> bool:
        if i.role != "batch":
            return layout.is_replicated
        return not any(layout.dims[1:]) and len(layout.dims[:1] and layout.dims[0]) == 1

    return _restricted(problem, "data-parallel", allowed)


def replicated(problem: Problem) -> Plan:
    """Everything whole on every device: the plan that always exists."""
    return _restricted(problem, "replicated", lambda _, layout: layout.is_replicated)


def _restricted(problem: Problem, name: str, allowed: Allowed) -> Plan:
    """The cheapest plan on the one-axis mesh whose inputs have allowed layouts."""
    clock = Clock()
    (mesh,) = problem.cluster.logical_meshes((problem.cluster.num_devices,))
    with clock.phase("program"):
        stated = build(problem, mesh)
        roles = {i.name: i for i in problem.graph.inputs}
        nodes = list(stated.problem.nodes)
        for v in stated.values.values():
            if v.source and v.node is not None:
                ok = np.array([allowed(roles[v.key], k) for k in v.layouts])
                nodes[v.node] = Node(nodes[v.node].name, np.where(ok, nodes[v.node].costs, np.inf))
    with clock.phase("solve"):
        solution = solve(replace(stated.problem, nodes=tuple(nodes)), time_limit_s=problem.options.time_limit_s)
    if not solution.choice:
        raise InfeasiblePlanError(
            f"{name} does not fit {problem.memory_limit_bytes} bytes a device", remedy="search='alpa', or more memory"
        )
    with clock.phase("extract"):
        sharding = extract(problem, stated, solution.choice)
    return assemble(problem, stated, sharding, name, solution.objective, solution.lower_bound, (), clock)
