"""`verify`: a plan's predictions against XLA's compiler of the devices that it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.api.effects import check_effects
from autopar.api.modules import split_arguments, without_modules
from autopar.api.options import ParallelOptions
from autopar.api.parallel_function import ParallelFunction
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster
from autopar.errors import PlanMismatchError
from autopar.lower.aot import (
    PipelineVerification,
    Target,
    Verification,
    compare,
    compare_stages,
    compile_for,
    compile_stages,
    parse_target,
    target_of,
)
from autopar.lower.pipeline.build import lower_pipeline
from autopar.lower.split_layers import split_layers
from autopar.plan import Plan


def verify(
    plan: Plan, fn: Callable[..., Any], *args: Any, target: str | None = None, timeout_s: float = 1800.0, **kwargs: Any
) -> Verification | PipelineVerification:
    """Compiles a plan's programs with the XLA compiler of a target, which need not be here, and compares.

    Args:
        plan: the plan. With several stages each program of each stage is compiled for the devices of that stage.
        fn: the function that it was made for, plain or decorated.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`.
        target: "cpu", "tpu:v5p:4x4x4" (chip and topology) or "cuda:h100:8x8" (nodes x devices); None takes the
            devices of the plan's cluster.
        timeout_s: seconds after which compiling is given up.
        kwargs: further arguments of ``fn``.

    Returns:
        Predicted against compiled: collectives by kind, count, bytes and mesh axis, and memory; with several stages
        by stage, and memory by worker, along its list of instructions.

    Raises:
        PlanMismatchError: the plan was made for another program, or for another number of devices.
        AutoparError: there is no such target, or its compiler is not installed or fails.
    """
    compiler_target = target_of(Cluster.from_json(plan.content.cluster)) if target is None else parse_target(target)
    check_size(plan, compiler_target)
    options = fn.options if isinstance(fn, ParallelFunction) else ParallelOptions()
    function = fn.function if isinstance(fn, ParallelFunction) else fn
    args, kwargs, modules = split_arguments(args, kwargs)
    signatures = ParallelOptions(
        plan=plan,
        batch_argnums=options.batch_argnums,
        precision=options.precision,
        static_argnums=options.static_argnums,
        static_argnames=options.static_argnames,
    )
    pure = PureFunction(without_modules(function) if modules else function, signatures)
    traced, plan = pure.plan(pure.resolve(args, kwargs)[0])
    check_effects(traced.graph)
    if plan.num_stages > 1:
        lowered = lower_pipeline(
            split_layers(traced, plan.content.stack_groups).step, plan, platform=compiler_target.platform
        )
        return compare_stages(plan, compiler_target, compile_stages(compiler_target, lowered, timeout_s))
    return compare(plan, traced.graph, compiler_target, compile_for(compiler_target, traced, plan, timeout_s))


def check_size(plan: Plan, target: Target) -> None:
    """Raises unless the plan has as many devices as the target."""
    devices = len({d for s in plan.stages for d in s.devices})
    if target.num_devices is not None and target.num_devices != devices:
        raise PlanMismatchError(
            f"the plan is for {devices} devices of {plan.content.cluster_name}; {target.text} has {target.num_devices}",
            cause="the plan was made for another cluster",
            remedy="plan for the target's cluster, or name a target of that many devices",
        )
