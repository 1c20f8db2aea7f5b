"""Checks of plans that workers on Ray carry out."""

from __future__ import annotations

from autopar.api.options import ParallelOptions
from autopar.api.shared_state import SharedState
from autopar.cluster import Cluster
from autopar.errors import PlanMismatchError
from autopar.plan import Plan
from autopar.runtime.ray.cluster import RayCluster
from autopar.search.decision import asks_for_branches


def stages_asked(options: ParallelOptions) -> int | None:
    """Number of stages that is asked for: as a number, by ``like``, or as workers on Ray; None where it is free."""
    asked = None if options.num_stages == "auto" else int(options.num_stages)
    if (shared := SharedState.of_stages(options.like)) is not None:
        asked = shared.checked_stages(options.cluster, options.num_stages)
    if isinstance(options.cluster, RayCluster) and asked is None and not asks_for_branches(options.schedule):
        return options.cluster.num_stages
    return asked


def check_for_workers(plan: Plan, cluster: Cluster) -> None:
    """Raises PlanMismatchError unless workers of ``cluster`` can carry out ``plan``."""
    content = plan.content
    if content.pipeline is None:
        raise PlanMismatchError(
            f"the plan has one stage, and {cluster.name} runs pipelines",
            remedy="plan with cluster=Cluster.ray(...), of one worker too",
        )
