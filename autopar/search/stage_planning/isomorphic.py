"""Stages whose problems are the same but for names: one of them is planned, the others are it under their names.

The problem of a stage is what it computes, the devices that it has, and the memory that microbatches in flight leave
it. Schedules with several stages on each worker give many stages the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.plan import PlanContent
from autopar.search.stage_planning.memory import received_bytes, stage_bytes
from autopar.search.stage_planning.shared import renamed_content
from autopar.search.stage_planning.stage_problem import ScheduledStages, graph_in_form, in_flight


@dataclass(frozen=True)
class IsomorphicStages:
    """Plans of stages of one candidate by what they are of.

    Args:
        pipeline: what is planned.
        placements: by stage its first device and the number of devices.
        meshes: by stage the shape of the logical mesh that is tried first; empty where none is.
        planned: by what it is of, the number of a stage with its plan.
    """

    pipeline: ScheduledStages
    placements: Sequence[tuple[int, int]]
    meshes: Sequence[tuple[int, ...]] = ()
    planned: dict[tuple[object, ...], tuple[int, PlanContent]] = field(default_factory=dict)

    def known(self, stage: int) -> PlanContent | None:
        """The plan of a stage that is that of another; None where there is none, or it does not fit."""
        pipeline, key = self.pipeline, self._key(stage)
        if key not in self.planned:
            return None
        other, content = self.planned[key]
        form = content.stages[0].form
        old, _ = graph_in_form(pipeline, other, form)
        new, form = graph_in_form(pipeline, stage, pipeline.named(form, other, stage))
        content = renamed_content(content, old, new).in_form(form)
        begin, size = self.placements[stage]
        limit = pipeline.problem.job.memory_limit_bytes or pipeline.problem.cluster.part(begin, size).memory_bytes
        return content if stage_bytes(content, pipeline.sliced, pipeline.table, stage) <= limit else None

    def keep(self, stage: int, content: PlanContent) -> None:
        """Keeps the plan of a stage for others."""
        if not self.pipeline.problem.job.constraints and not content.stages[0].form.layered_update:
            self.planned.setdefault(self._key(stage), (stage, content))

    def _key(self, stage: int) -> tuple[object, ...]:
        pipeline, (begin, size) = self.pipeline, self.placements[stage]
        return (
            pipeline.first(stage),
            size,
            bisect_right(pipeline.problem.cluster.group_starts, begin),
            self.meshes[stage] if self.meshes else None,
            in_flight(pipeline.table, stage),
            pipeline.in_flight(stage),
            received_bytes(pipeline.sliced, stage, size),
        )
