"""Plans that people name: those written by hand, and those of degrees of parallelism (tp, pp, dp and the ZeRO stage).

The strategies are restrictions of the same problem. `named_degrees` completes degrees that a person gives;
`all_degrees` lists those that a cluster has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from autopar.cluster import Cluster
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
    """ZeRO stage 2 over all devices: gradients that microbatches add up are split too."""
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
    return restricted_plan(problem, restricted, name, clock, best.notes(problem), considered)


def named_degrees(cluster: Cluster, given: Mapping[str, Any]) -> Manual:
    """The plan of the given degrees; dp takes the devices that the others leave.

    Args:
        cluster: whose devices the degrees multiply to.
        given: by argument of `Manual` its value.

    Raises:
        InfeasiblePlanError: the degrees do not divide the devices.
    """
    if "dp" in given:
        return Manual(**given)
    others = Manual(**given)
    per = others.tp * others.pp * others.cp
    if cluster.num_devices % per:
        raise InfeasiblePlanError(
            f"tp={others.tp} times pp={others.pp} times cp={others.cp} are {per}; {cluster.name} has "
            f"{cluster.num_devices} devices",
            remedy="degrees whose product divides the devices",
        )
    return Manual(**{**given, "dp": cluster.num_devices // per})


def all_degrees(cluster: Cluster, given: Mapping[str, Any], *, one_microbatch: bool = False) -> tuple[Manual, ...]:
    """All plans of a cluster by tp, pp, dp and ZeRO stage, tp inside of a node.

    Args:
        cluster: whose devices the degrees multiply to.
        given: degrees that stay as they are, by argument of `Manual`; the others are free.
        one_microbatch: whether steps have one microbatch, in which ZeRO stage 2 is the plan of stage 1 and is listed
            only where it is given.

    Raises:
        InfeasiblePlanError: no degrees have the given values.
    """
    devices, node = cluster.num_devices, min(g.devices_per_node for g in cluster.groups)
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    plans = []
    zero_stages = [n for n in (0, 1, 2, 3) if n != 2 or not one_microbatch or given.get("zero") == 2]
    for tp, pp, dp, zero in itertools.product(divisors, divisors, divisors, zero_stages):
        degrees: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "zero": zero}
        fixed = all(degrees.get(name, value) == value for name, value in given.items())
        splits_state = zero == 0 or dp > 1
        inside = tp <= node or "tp" in given
        if fixed and inside and splits_state and tp * pp * dp * given.get("cp", 1) == devices:
            plans.append(Manual(**{**given, **degrees}))
    if not plans:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        raise InfeasiblePlanError(
            f"no degrees with {text} multiply to the {devices} devices of {cluster.name}",
            remedy="leave some of them free",
        )
    return tuple(plans)


def degrees_text(manual: Manual) -> str:
    """``tp=8 pp=2 dp=4 zero=1``, and further arguments that are not their defaults."""
    default = Manual()
    shown = [
        "tp",
        "pp",
        "dp",
        *(n for n in ("cp", "ep", "chunks") if getattr(manual, n) != getattr(default, n)),
        "zero",
    ]
    return " ".join(f"{name}={getattr(manual, name)}" for name in shown)
