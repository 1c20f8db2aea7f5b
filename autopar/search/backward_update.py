"""Whether layers are updated one at a time, and whether inside of the backward loop, with what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from autopar.plan import Plan
from autopar.search.source import StepSource


@dataclass
class BackwardUpdate:
    """Facts about updates in the backward loop of a step, asked where memory is short.

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


def layered_updates(offload: str, step: StepSource) -> tuple[bool, ...]:
    """Whether layers are updated one at a time, in a loop of their own, in the order in which that is tried.

    Args:
        offload: the option.
        step: the step.
    """
    if offload == "none" or not step.may_update_by_layer():
        return (False,)
    return (True,) if offload == "layers" else (False, True)
