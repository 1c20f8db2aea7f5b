"""Whether layers may be updated inside of the backward loop, asked where memory is short, with what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from autopar.plan import Plan
from autopar.search.source import StepSource


@dataclass
class BackwardUpdate:
    """What a step says of it, if it is asked.

    Args:
        step: the step.
        offload: the option: with one, what hosts hold is updated in loops of its own.
        notes: on gradients whose stacks are kept.
    """

    step: StepSource
    offload: str
    notes: dict[str, None] = field(default_factory=dict)

    def __call__(self) -> bool:
        """Whether it may be."""
        if self.offload != "none":
            return False
        possible, note = self.step.update_in_backward()
        self.notes.update({note: None} if note else {})
        return possible

    def noted(self, plan: Plan) -> Plan:
        """A plan with the notes, where memory binds."""
        if not plan.content.memory_bound or not self.notes:
            return plan
        return replace(plan, content=msgspec.structs.replace(plan.content, notes=(*plan.content.notes, *self.notes)))
