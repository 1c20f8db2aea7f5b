"""Which part of a train step an operator belongs to."""

from __future__ import annotations

#: Scope of the loop over microbatches in the graph of a pipeline stage.
LOOP = "microbatches"

#: Scope of loops over microbatches, by which they belong to the forward pass: their first operators do.
FORWARD_LOOP = "jvp(loop)"


def phase_of(scope: str, enclosing: str = "update") -> str:
    """ "forward", "backward" or "update", from the name stack that differentiation leaves.

    Args:
        scope: the operator's name stack.
        enclosing: phase of the loop or branch that it is in; what is not marked belongs to it, and all of it does where
            that is the backward pass.
    """
    if enclosing == "backward" or "transpose(" in scope or "rematted_computation" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else enclosing
