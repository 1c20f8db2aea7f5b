"""What a plan must not have where workers on Ray carry it out."""

from __future__ import annotations

from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster
from autopar.errors import PlanMismatchError
from autopar.lower.unstack import Unstacked
from autopar.plan import Plan
from autopar.runtime.ray.cluster import RayCluster


def check_for_workers(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanMismatchError unless workers of ``cluster`` can carry out ``plan``."""
    content = plan.content
    if content.pipeline is None:
        raise PlanMismatchError(
            f"the plan has one stage, and {cluster.name} runs pipelines",
            remedy="plan with cluster=Cluster.ray(...), of one worker too",
        )
    if any(i.memory == "host" for i in content.inputs) or any(s.activations_offloaded for s in content.stages):
        raise PlanMismatchError(
            f"the plan keeps something in host memory, and workers of {cluster.name} keep all on their devices",
            remedy="plan with offload='none'",
        )


def kept_on_devices(options: ParallelOptions, unstacked: Unstacked) -> str:
    """Why no state of a pipeline lies in host memory where it was asked for; "" where it may."""
    told = f"offload={options.offload!r} moves nothing to host memory: "
    if options.offload != "none" and isinstance(options.cluster, RayCluster):
        return told + "workers on Ray keep all on their devices"
    if options.offload != "none" and unstacked.groups > 1:
        return told + "layers that lie in one array are taken apart for the stages"
    return ""
