"""A plan of AMPNet: its programs, and what they may not do."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stale import apart_programs, check_shares
from autopar.lower.step import Step
from autopar.plan import Plan
from autopar.schedule import build
from autopar.schedule.ampnet import AmpFlow, numbers_of


@dataclass(frozen=True, eq=False)
class AmpPipeline:
    """AMPNet, ready to be loaded.

    Args:
        pipeline: its plan and programs.
        flow: what they carry out.
    """

    pipeline: LoweredPipeline
    flow: AmpFlow


def lower_ampnet(step: Step, plan: Plan, platform: str = "cpu") -> AmpPipeline:
    """Programs of ``plan``, whose schedule is `autopar.schedule.ampnet.AmpNet`.

    Args:
        step: as of `autopar.lower.pipeline.build.lower_pipeline`.
        plan: a plan with several stages.
        platform: jax's name of the kind of devices.

    Raises:
        ScheduleError: an update takes something of other stages, or of a part of the batch what is no sum; what the
            loss takes of the state without the batch is outside the passes.
    """
    _, every = numbers_of(plan.schedule, plan.num_stages)
    apart = apart_programs(step, plan, platform, plan.num_microbatches // every)
    flow = AmpFlow.of(plan.schedule, plan.num_stages, plan.num_microbatches, apart.dataflow, apart.replaces)
    if every < plan.num_microbatches:
        check_shares(step.graph, flow.dataflow, plan.schedule)
    program = build(apart.cut.table, flow.dataflow)
    return AmpPipeline(LoweredPipeline(plan, apart.cut.map, apart.programs, program), flow)
