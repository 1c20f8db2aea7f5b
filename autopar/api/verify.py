"""`verify`: a plan's predictions against XLA's compiler of the devices that it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.api.mutable import split_mutable
from autopar.api.options import ParallelOptions
from autopar.api.parallel_function import ParallelFunction
from autopar.api.programs import check_effects
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster
from autopar.lower.aot import (
    PipelineVerification,
    Verification,
    check_size,
    compiled_plan,
    parse_target,
    target_of,
)
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
    args, kwargs, mutable = split_mutable(args, kwargs)
    signatures = ParallelOptions(
        plan=plan,
        batch_argnums=options.batch_argnums,
        precision=options.precision,
        wire=options.wire,
        static_argnums=options.static_argnums,
        static_argnames=options.static_argnames,
    )
    pure = PureFunction(mutable.pure(function), signatures)
    traced, plan = pure.plan(pure.resolve(args, kwargs)[0])
    check_effects(traced.graph)
    return compiled_plan(traced, plan, compiler_target, timeout_s)
