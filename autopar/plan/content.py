"""`PlanContent`: everything of a plan that its file holds."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from autopar.plan.pipeline import Pipeline
from autopar.plan.types import (
    Choice,
    Considered,
    Copy,
    InputRecord,
    OperatorRecord,
    OutputRecord,
    Remat,
    Stage,
)


class SearchContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the search says of its answer, without times (they differ from run to run).

    Args:
        strategy: its name.
        objective: seconds that it made least.
        lower_bound: seconds that no plan of the problem can beat, over all that was free; never more than the plan's
            step time. None where nothing was proven.
        considered: other options.
        unlimited_s: seconds that no plan of the problem can beat though it used any amount of memory; None where the
            memory limit decided nothing, or where that is not known. Then it is not in the file.
        sharding_bound: where more than the sharding of one stage was free, seconds that no sharding beats in the plan's
            number of microbatches and with what the plan recomputes. None elsewhere; then it is not in the file.
    """

    strategy: str
    objective: float
    lower_bound: float | None
    considered: tuple[Considered, ...] = ()
    unlimited_s: float | None = None
    sharding_bound: float | None = None


class PlanContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of a plan that its file holds; identical input gives identical content.

    Args:
        program: name of the function.
        fingerprint: hash of its graph; a plan runs this program only.
        cluster: the cluster's own JSON form.
        cluster_name: its name.
        step_time: predicted seconds a step.
        peak_memory: predicted bytes on the fullest device.
        num_microbatches: parts of the batch that run one after another.
        schedule: name of the pipeline schedule; "none" for one stage.
        stages: see `Stage`.
        inputs: argument leaves, in order.
        outputs: result leaves, in order.
        operators: sharding of every operator.
        copies: shared copies.
        choices: what `explain` tells.
        search: see `SearchContent`.
        notes: lines worth reading: operators without a rule, sizes that nothing divides.
        memory_limit: bytes a device that the plan had to keep within.
        memory_bound: the memory limit decided something: programs keep no copy longer than they need it.
        donated: paths of the argument leaves whose buffers are reused.
        pipeline: schedule, works and values of several stages; None without a pipeline, and then not in the file.
        cuts: ids of the last forward operator of every stage but the last.
        stack_groups: groups of layers into which stacks of layers are taken apart.
        rewrites: lines on products that are computed in another order than the program says.
        parts: the plan of each stage's own graph; empty without a pipeline.
        product_flops: (dtype, FLOPs a step) of the products of the program as it was written; empty where they were
            not counted, and then not in the file.
    """

    program: str
    fingerprint: str
    cluster: str
    cluster_name: str
    step_time: float
    peak_memory: int
    num_microbatches: int
    schedule: str
    stages: tuple[Stage, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[OutputRecord, ...]
    operators: tuple[OperatorRecord, ...]
    copies: tuple[Copy, ...]
    choices: tuple[Choice, ...]
    search: SearchContent
    notes: tuple[str, ...] = ()
    memory_limit: int = 0
    memory_bound: bool = False
    donated: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    cuts: tuple[str, ...] = ()
    parts: tuple[PlanContent, ...] = ()
    stack_groups: int = 1
    rewrites: tuple[str, ...] = ()
    product_flops: tuple[tuple[str, float], ...] = ()

    def in_form(
        self,
        level: Remat,
        layer_ends: tuple[str, ...],
        layered_update: bool = False,
        backward_update: bool = False,
        segment_layers: int = 0,
    ) -> PlanContent:
        """The same, saying what its one stage recomputes and how it updates; arguments are fields of `Stage`."""
        if level == "none" and not (layered_update or backward_update or segment_layers):
            return self
        (stage,) = self.stages
        ends = () if level == "none" else layer_ends
        loops = {
            "layered_update": layered_update,
            "backward_update": backward_update,
            "segment_layers": segment_layers,
        }
        return replace(self, stages=(replace(stage, remat=level, layer_ends=ends, **loops),))

    def in_blocks(self, block_scores: int) -> PlanContent:
        """The same, saying from which size of scores on attention runs in blocks; see `Stage`."""
        if not block_scores:
            return self
        note = "attention runs in blocks: scores are made again in the backward pass, and never kept"
        stages = tuple(replace(s, block_scores=block_scores) for s in self.stages)
        return replace(self, stages=stages, notes=(*self.notes, note))

    def with_padding(self, padded: tuple[tuple[str, int, int], ...], notes: tuple[str, ...]) -> PlanContent:
        """The same, saying which dims are padded inside.

        Args:
            padded: see `Stage`.
            notes: a line on each.
        """
        if not padded:
            return self
        (stage,) = self.stages
        return replace(self, stages=(replace(stage, padded=padded),), notes=(*self.notes, *notes))
