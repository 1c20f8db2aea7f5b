"""Whether layers are updated one at a time, and whether inside of the backward loop."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search.techniques.base import Asked, Switch


@dataclass(frozen=True)
class BackwardUpdate(Switch):
    """Updates inside of the backward loop over layers. Gradients that are kept are the step's to tell: `StepSource`."""

    field: str = "backward_update"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        job = asked.problem.job
        if job.offload != "none":
            return f"offload={job.offload!r} updates layers in loops of their own"
        if asked.problem.request.token_slices is not None:
            return "slices of tokens add gradients up"
        if asked.is_stage and (job.num_microbatches or 1) > 1:
            return "microbatches add gradients up"
        return "" if asked.updates_in_backward() else "no backward loop makes gradients that their update alone reads"


@dataclass(frozen=True)
class LayeredUpdate(Switch):
    """Updates of layers one at a time, in a loop of their own, so that their state may lie on hosts."""

    field: str = "layered_update"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        if asked.problem.job.offload == "none":
            return "offload='none' keeps state on devices"
        return "" if asked.updates_by_layer() else "no update treats stacked layers one by one"

    def options(self, asked: Asked) -> tuple[bool, ...]:
        """See `PlannedTechnique`. Where whole layers are to lie on hosts it is not left out."""
        if self.obstacle(asked):
            return ()
        return (True,) if asked.problem.job.offload == "layers" else (False, True)


BACKWARD_UPDATE, LAYERED_UPDATE = BackwardUpdate(), LayeredUpdate()
