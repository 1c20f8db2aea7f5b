"""Whether a plan, or the cluster that is to be planned for, has the devices that there are."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.errors import ClusterError, PlanMismatchError
from autopar.plan import Plan


def check_devices(plan: Plan | None, cluster: Cluster | None, count: int) -> None:
    """Raises where what is to run needs another number of devices than ``count``, before anything is planned.

    Args:
        plan: that was given; None where one will be made.
        cluster: that it will be made for; None takes the devices that there are.
        count: devices of all processes.

    Raises:
        PlanMismatchError: the plan is for another number.
        ClusterError: the cluster has another number.
    """
    if plan is not None:
        wanted = len({d for s in plan.stages for d in s.devices})
        if wanted != count:
            raise PlanMismatchError(
                f"the plan is for {wanted} devices of {plan.content.cluster_name}; this process has {count}",
                cause="the plan was made for another cluster",
                remedy="plan again for Cluster.local(), or run where there are as many devices",
            )
    elif cluster is not None and cluster.num_devices != count:
        raise ClusterError(
            f"{cluster} has {cluster.num_devices} devices; this process has {count}, so the step cannot run here",
            cause="the cluster was given to plan for it; .plan() and .lower().plan need none of its devices",
            remedy="cluster=None to run on the devices that there are, or run where the cluster's are (on CPU: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N)",
        )
