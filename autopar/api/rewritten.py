"""Functions whose products are computed in another order where that pays, and plans that say so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster
from autopar.cost import product_flops
from autopar.frontend import Traced
from autopar.lower.rewrites import reassociated_bound
from autopar.plan import Plan
from autopar.search.algebra import change_notes, pays


def rewritten(traced: Traced, options: ParallelOptions) -> Traced:
    """A traced function with products in another order where that pays and the options allow it."""
    if not options.rewrites:
        return traced
    num_devices = _num_devices(options)
    batch = [i.name for i in traced.graph.inputs if i.role == "batch"]
    worth = partial(pays, policy=options.policy.algebra, num_devices=num_devices)
    program, changes = reassociated_bound(traced.program, batch, worth)
    if not changes:
        return traced
    return replace(traced, program=program, rewrites=change_notes(changes, num_devices), as_written=traced)


def form_of(traced: Traced, plan: Plan) -> Traced:
    """The function as it was when ``plan`` was made: as it is written, or with products in another order."""
    return traced if plan.rewrites or traced.as_written is None else traced.as_written


def about(plan: Plan, traced: Traced) -> Plan:
    """``plan`` with facts about its function: what was rewritten, the FLOPs of its products as written,
    and the decorated functions that it calls."""
    written = traced.graph if traced.as_written is None else traced.as_written.graph
    facts = msgspec.structs.replace(
        plan.content,
        rewrites=traced.rewrites,
        product_flops=product_flops(written),
        notes=(*plan.content.notes, *(n for n in traced.nested if n not in plan.content.notes)),
    )
    return replace(plan, content=facts)


def _num_devices(options: ParallelOptions) -> int:
    if options.plan is not None:
        return len({device for stage in options.plan.stages for device in stage.devices})
    return (options.cluster or Cluster.local()).num_devices
