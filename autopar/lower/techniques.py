"""`in_form`: a step as its form says, technique by technique.

The order is that of `TECHNIQUES`: each is applied to what those before it made. A new technique is a field of
`autopar.plan.StepForm`, its name in `autopar.plan.form`, a file that rewrites a step, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from msgspec import structs

from autopar.errors import InfeasiblePlanError
from autopar.frontend import Traced
from autopar.lower.layer_techniques import in_segments, updated_by_layer, updated_in_backward
from autopar.lower.microbatch import microbatched
from autopar.lower.padded import padded
from autopar.lower.rewrites import blockwise_bound, recomputed_step
from autopar.plan import StepForm


@dataclass(frozen=True)
class Technique:
    """A technique as a rewriting.

    Args:
        field: of `StepForm`.
        apply: the step that it makes of another, from the step, its form, and ids of operators whose results are held
            whatever is recomputed. The step itself where it has nothing to change.
        wants: what a step has that it changes, for the error of one that has not.
    """

    field: str
    apply: Callable[[Traced, StepForm, Set[str]], Traced]
    wants: str


def in_form(
    traced: Traced, form: StepForm, techniques: Sequence[Technique], held: Set[str] = frozenset()
) -> tuple[Traced, StepForm]:
    """A step with those of some techniques that a form has.

    Args:
        traced: the step.
        form: with the ends of layers, where something is recomputed.
        techniques: in order.
        held: ids of operators whose results are held whatever is recomputed.

    Returns it, and the form without those techniques that leave its graph as it was.

    Raises:
        InfeasiblePlanError: a technique has nothing to change.
        MicrobatchError: there cannot be as many microbatches.
    """
    plain = StepForm()
    for technique in techniques:
        if getattr(form, technique.field) == getattr(plain, technique.field):
            continue
        before, traced = traced, technique.apply(traced, form, held)
        if traced is before:
            raise InfeasiblePlanError(
                f"{traced.graph.name} cannot take the form {' '.join(form.words)}",
                cause=f"there is no {technique.wants}",
                remedy="plan again: the function, or what is applied before, changed it",
            )
        if traced.graph == before.graph:
            traced = before
            form = structs.replace(form, **{technique.field: getattr(plain, technique.field)})
    return traced, form


def _in_blocks(traced: Traced, form: StepForm, held: Set[str]) -> Traced:
    program = blockwise_bound(traced.program, form.block_scores)
    return traced if program is traced.program else replace(traced, program=program)


#: Applied before independent factorizations are dealt out.
FIRST = (Technique("padded", lambda step, form, held: padded(step, form.padded), "dim that is to be padded"),)

#: Applied to what that made.
TECHNIQUES = (
    Technique(
        "remat",
        lambda step, form, held: recomputed_step(step, form.remat, form.layer_ends, held)[0],
        "backward pass",
    ),
    Technique(
        "backward_update",
        lambda step, form, held: updated_in_backward(step),
        "backward loop over stacked layers that makes gradients of which nothing but their own update reads any",
    ),
    Technique(
        "segment_layers",
        lambda step, form, held: in_segments(step, form.segment_layers),
        "pair of loops over layers that divides into such segments, the second of which reads what the first leaves",
    ),
    Technique(
        "layered_update",
        lambda step, form, held: updated_by_layer(step),
        "update that treats stacked layers one by one",
    ),
    Technique(
        "microbatches",
        lambda step, form, held: microbatched(step, form.microbatches),
        "batch",
    ),
    Technique("block_scores", _in_blocks, "attention of as many scores"),
)
