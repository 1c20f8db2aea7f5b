"""What a plan must not have where workers on Ray carry it out."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.errors import PlanMismatchError
from autopar.plan import Plan


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
