"""Plans that are named by their degrees of parallelism, as practitioners compare them: tp, pp, dp and the ZeRO stage.

`named_degrees` completes degrees that a person gives; `all_degrees` lists those that a cluster has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search.manual import Manual


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


def all_degrees(cluster: Cluster, given: Mapping[str, Any]) -> tuple[Manual, ...]:
    """All plans of a cluster by tp, pp, dp and ZeRO stage, tp inside of a node.

    Args:
        cluster: whose devices the degrees multiply to.
        given: degrees that stay as they are, by argument of `Manual`; the others are free.

    Raises:
        InfeasiblePlanError: no degrees have the given values.
    """
    devices, node = cluster.num_devices, min(g.devices_per_node for g in cluster.groups)
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    plans = []
    zero_stages = (0, 1, 3)  # stages 1 and 2 are one plan, see `Manual`
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
