"""Stages that have no room in so many microbatches, and so in fewer: a fact about a stage that a search finds once.

Stages are cut and planned in one number of microbatches after another, on one mesh shape after another, by relaxations
and exactly. Where equal pieces of all values of a stage do not fit its devices (`NoRoomError`), none of these has a
plan in that number. In fewer microbatches each is larger, and as much or more is in flight. One microbatch is left
out, for gradients are not added up there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from autopar.plan import StepForm
from autopar.search.outcome import NoRoomError
from autopar.search.pipeline.stage_problem import PlacedStage


@dataclass(frozen=True)
class _Proof:
    """Proof that a stage has no room.

    Args:
        count: microbatches.
        in_flight: of them.
        error: what was raised.
    """

    count: int
    in_flight: int
    error: NoRoomError

    def holds_for(self, count: int, in_flight: int) -> bool:
        """Whether there is no room either in ``count`` microbatches of which so many are in flight."""
        as_large = count == self.count or 1 < count < self.count
        return as_large and in_flight * self.count >= self.in_flight * count


@dataclass(eq=False)
class _Proofs:
    """Proofs that one stage has no room in one form."""

    proofs: list[_Proof] = field(default_factory=list)


def check_known(placed: PlacedStage, form: StepForm) -> None:
    """Raises `NoRoomError` where the stage is known to have no room in the form, or in it in more microbatches."""
    pipeline = placed.pipeline
    in_flight = pipeline.in_flight(placed.stage)
    for proof in _of(placed, form).proofs:
        if proof.holds_for(form.microbatches, in_flight):
            raise proof.error.with_traceback(None)


def keep(placed: PlacedStage, form: StepForm, error: NoRoomError) -> None:
    """Keeps that a stage has no room in a form, as an error says."""
    in_flight = placed.pipeline.in_flight(placed.stage)
    _of(placed, form).proofs.append(_Proof(form.microbatches, in_flight, error))


def _of(placed: PlacedStage, form: StepForm) -> _Proofs:
    pipeline, stage = placed.pipeline, placed.stage
    problem = pipeline.problem
    key = problem.store.key(
        "no room",
        problem.graph,
        problem.cost_model,
        pipeline.members[stage],
        placed.part,
        structs.replace(pipeline.of_stage(stage, form), microbatches=1),  # where layers end counts
        problem.memory_limit_bytes,
        pipeline.other_stages(stage),
    )
    return problem.store.once(key, _Proofs)
