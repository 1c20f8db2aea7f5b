"""A plan of any number of stages, compiled for a target."""

from __future__ import annotations

from autopar.errors import PlanMismatchError
from autopar.frontend import Traced
from autopar.lower.aot.base import Target
from autopar.lower.aot.compare import compare
from autopar.lower.aot.pipeline_verification import PipelineVerification, compare_stages
from autopar.lower.aot.spawn import compile_for
from autopar.lower.aot.stages import compile_stages
from autopar.lower.aot.verification import Verification
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan


def compiled_plan(
    traced: Traced, plan: Plan, target: Target, timeout_s: float = 1800.0
) -> Verification | PipelineVerification:
    """A plan compiled for a target, with its predictions.

    Args:
        traced: the function in the form that the plan was made for.
        plan: the plan, for as many devices as the target has.
        target: what to compile for.
        timeout_s: seconds after which compiling is given up.

    Raises:
        AutoparError: the target's compiler is not installed, or fails.
    """
    if plan.num_stages > 1:
        lowered = lower_pipeline(split_layers(traced, plan.content.stack_groups).step, plan, platform=target.platform)
        return compare_stages(plan, target, compile_stages(target, lowered, timeout_s))
    return compare(plan, traced.graph, target, compile_for(target, traced, plan, timeout_s))


def check_size(plan: Plan, target: Target) -> None:
    """Raises unless the plan has as many devices as the target."""
    devices = len({d for s in plan.stages for d in s.devices})
    if target.num_devices is not None and target.num_devices != devices:
        raise PlanMismatchError(
            f"the plan is for {devices} devices of {plan.content.cluster_name}; {target.text} has {target.num_devices}",
            cause="the plan was made for another cluster",
            remedy="plan for the target's cluster, or name a target of that many devices",
        )
