"""Plans that people write by hand, as restrictions of the same problem."""

from __future__ import annotations

from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.plan import Considered, Plan
from autopar.search.clock import Clock
from autopar.search.manual import Manual
from autopar.search.problem import Problem
from autopar.search.restrict import restricted_plan, solve_restricted


def data_parallel(problem: Problem) -> Plan:
    """Batch split over all devices on its first dim; everything else is whole.

    Raises:
        InfeasiblePlanError: the number of devices does not divide the first dim of a batch argument.
    """
    clock = Clock()
    solved = Manual(dp=problem.cluster.num_devices).solve(problem, clock)
    return restricted_plan(problem, solved, "data-parallel", clock)


def replicated(problem: Problem) -> Plan:
    """Everything whole on every device: the plan that always exists."""
    clock = Clock()
    (mesh,) = problem.cluster.logical_meshes((problem.cluster.num_devices,))
    solved = solve_restricted(problem, mesh, lambda _, layouts: [k.is_replicated for k in layouts], clock)
    return restricted_plan(problem, solved, "replicated", clock)


def zero1(problem: Problem) -> Plan:
    """ZeRO stage 1 over all devices: data parallelism with the optimizer state split (Rajbhandari et al., 2020)."""
    return Manual(dp=problem.cluster.num_devices, zero=1).plan(problem, "zero1")


def zero2(problem: Problem) -> Plan:
    """ZeRO stage 2 over all devices: gradients are split too, as they are made."""
    return Manual(dp=problem.cluster.num_devices, zero=2).plan(problem, "zero2")


def zero3(problem: Problem) -> Plan:
    """ZeRO stage 3 over all devices: parameters are split too (FSDP)."""
    return Manual(dp=problem.cluster.num_devices, zero=3).plan(problem, "zero3")


def megatron(problem: Problem) -> Plan:
    """The fastest of all tensor-parallel times data-parallel grids, tensor parallelism inside a node.

    Raises:
        InfeasiblePlanError: none of them fits.
    """
    return _best_grid(problem, "megatron", 0)


def fsdp_tp(problem: Problem) -> Plan:
    """`megatron` with ZeRO stage 3 over the data-parallel devices (Zhao et al., "PyTorch FSDP", 2023).

    Raises:
        InfeasiblePlanError: no grid fits.
    """
    return _best_grid(problem, "fsdp-tp", 3)


def _best_grid(problem: Problem, name: str, zero: int) -> Plan:
    """The fastest of all tensor-parallel times data-parallel grids with a stage of ZeRO."""
    clock = Clock()
    n = problem.cluster.num_devices
    node = min(g.devices_per_node if g.inter != "intra" else g.size for g in problem.cluster.groups)
    tried = []
    for tp in (t for t in range(1, min(n, node) + 1) if n % t == 0):
        grid = Manual(tp=tp, dp=n // tp, zero=zero)
        try:
            tried.append((grid, grid.solve(problem, clock)))
        except (InfeasiblePlanError, ConstraintError) as error:
            if tp == min(n, node) and not tried:
                raise error
    fitting = [(g, r) for g, r in tried if r.solution.found]
    best, restricted = min(fitting or tried, key=lambda t: (t[1].solution.objective, t[0].tp))
    considered = tuple(
        Considered(
            f"tp={g.tp}, dp={g.dp}",
            r.solution.objective if r.solution.found else None,
            None,
            "chosen" if g is best else r.solution.status.value,
        )
        for g, r in tried
    )
    return restricted_plan(problem, restricted, name, clock, best.notes(), considered)
