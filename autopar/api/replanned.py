"""The same call planned with other options: prices of constraints, and plans that a compiler judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import msgspec

from autopar.api.constraints import MOST_PRICED, price_note, void_notes
from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster
from autopar.frontend import CallSignature, Traced
from autopar.lower.aot import PipelineVerification, Target, Verification, check_size, compiled_plan, parse_target
from autopar.plan import Plan
from autopar.search.compiled_plans import PlanKind, Planned, fastest_compiled

#: Plans a call with options, for bytes a device; None takes the devices' memory.
Replan: TypeAlias = Callable[[CallSignature, ParallelOptions], Callable[[int | None], Planned[Traced]]]

#: What a free search is compared with: plans that people write by hand.
_NAMED = ("data-parallel", "zero1", "zero3", "megatron")


def target_cluster(verify: str | None) -> Cluster | None:
    """The cluster of a target that says how many devices it has; None of others, and without one."""
    target = None if verify is None else parse_target(verify)
    return None if target is None or target.num_devices is None else target.cluster()


def verified_plan(
    options: ParallelOptions, replan: Replan, signature: CallSignature, limit_bytes: int | None
) -> tuple[Traced, Plan]:
    """The plan that `parallelize(verify=...)` takes, with the function in the form that it was made for.

    Args:
        options: what was asked for, with ``verify``.
        replan: plans the call with other options.
        signature: of the call.
        limit_bytes: bytes a device; None takes the devices' memory.

    Raises:
        AutoparError: the compiler is not installed or fails, or the target has another number of devices.
        InfeasiblePlanError: no plan has a program within the limit.
    """
    assert options.verify is not None
    target = parse_target(options.verify)
    target.check_installed()
    free = replace(options, verify=None)
    kinds = [PlanKind(name, replan(signature, changed)) for name, changed in _kinds(free)]
    limit = limit_bytes or (options.cluster or Cluster.local()).memory_bytes

    def build(planned: Planned[Traced]) -> Verification | PipelineVerification:
        return _compiled(planned, target, options)

    planned, _ = fastest_compiled(kinds, limit, build, options.policy, target.text)
    return planned.traced, planned.plan


def _kinds(options: ParallelOptions) -> list[tuple[str, ParallelOptions]]:
    """Ways to plan, by name: what was asked for first; others only where the search is free to choose."""
    search = options.search
    if search != "alpa":
        return [(search if isinstance(search, str) else type(search).__name__, options)]
    others = [(name, replace(options, search=name)) for name in _NAMED]
    if options.num_stages == "auto":
        others.append(("one stage", replace(options, num_stages=1)))
    return [(search, options), *others]


def _compiled(
    planned: Planned[Traced], target: Target, options: ParallelOptions
) -> Verification | PipelineVerification:
    check_size(planned.plan, target)
    if options.progress is not None:
        options.progress(f"compiling for {target.text}")
    return compiled_plan(planned.traced, planned.plan, target)


def with_prices(options: ParallelOptions, replan: Replan, signature: CallSignature, plan: Plan) -> Plan:
    """``plan`` with a note for each constraint: what it costs against leaving it free, or that it does nothing.

    Args:
        options: what was asked for.
        replan: plans the call with other options.
        signature: of the call.
        plan: the plan.
    """
    limit = options.memory_limit_bytes
    void = void_notes(options.constraints, [i.path for i in plan.content.inputs])
    pins = tuple(p for p in options.constraints if p not in void)
    groups = [(pin,) for pin in pins] if len(pins) <= MOST_PRICED else [pins]
    notes = list(void.values())
    for group in groups if pins else []:
        rest = tuple(p for p in pins if p not in group)
        free = replan(signature, replace(options, constraints=rest, verify=None))(limit)
        notes.append(price_note(group, plan.step_time, free.plan.step_time))
    content = msgspec.structs.replace(plan.content, notes=(*notes, *plan.content.notes))
    return replace(plan, content=content) if notes else plan
