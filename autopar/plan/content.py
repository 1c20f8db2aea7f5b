"""`PlanContent`: everything of a plan that its file holds."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from autopar.plan.form import StepForm
from autopar.plan.pipeline import Pipeline
from autopar.plan.types import (
    Choice,
    Considered,
    Copy,
    InputRecord,
    OperatorRecord,
    OutputRecord,
    Stage,
)


class SearchContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The search's statement on its answer, without times (they differ from run to run).

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
        stages: parts of the program with their devices, in order.
        inputs: argument leaves, in order.
        outputs: result leaves, in order.
        operators: sharding of every operator.
        copies: shared copies.
        choices: what `explain` tells.
        search: bound, gap and trail of the search, without times, which differ from run to run.
        notes: lines worth reading: operators without a rule, sizes that nothing divides.
        memory_limit: bytes a device that the plan had to keep within.
        memory_bound: the memory limit decided something: programs keep no copy longer than they need it.
        donated: paths of the argument leaves whose buffers are reused.
        pipeline: schedule, works and values of several stages; None without a pipeline, and then not in the file.
        cuts: ids of the last forward operator of every stage but the last.
        stack_groups: groups of layers into which stacks of layers are taken apart.
        rewrites: lines on products that are computed in another order than the program says.
        parts: the plan of each stage's own graph; empty without a pipeline.
        product_flops: (dtype, FLOPs a step) of the products of the program as it was written; empty where they were not
            counted, and then not in the file.
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

    def in_form(self, form: StepForm, notes: tuple[str, ...] = ()) -> PlanContent:
        """The same, saying what its one stage was turned into.

        How it fetches layers from hosts, and dims that the strategy padded by itself, stay as planned.

        Args:
            form: microbatches, recomputation and what else the stage was turned into before it was sharded.
            notes: lines on it that are worth reading.
        """
        (stage,) = self.stages
        form = replace(form, slices_ahead=stage.form.slices_ahead, padded=form.padded or stage.form.padded)
        lines = (*self.notes, *blocks_note(form.block_scores), *notes)
        return replace(self, stages=(replace(stage, form=form),), notes=lines)

    def in_blocks(self, block_scores: int) -> PlanContent:
        """The same, saying of all stages from which size of scores on attention runs in blocks; see `StepForm`."""
        stages = tuple(replace(s, form=replace(s.form, block_scores=block_scores)) for s in self.stages)
        return replace(self, stages=stages, notes=(*self.notes, *blocks_note(block_scores)))


def blocks_note(block_scores: int) -> tuple[str, ...]:
    """The note on attention in blocks; none where it runs as the program says."""
    said = "attention runs in blocks: scores are made again in the backward pass, and never kept"
    return (said,) if block_scores else ()
