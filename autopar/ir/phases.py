"""Marks of operators: which part of a step an operator belongs to, and what the compiler made it for.

Whoever makes an operator marks it: the frontend from the transformations that jax recorded, a rewrite for
the loops that it adds. Names and scopes are the user's own, and are never read for this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from autopar.ir.graph import Operator
from autopar.ir.primitives import CONTRACTIONS

#: Of the forward pass of what is differentiated.
FORWARD: Final = "forward"
#: Of the backward pass.
BACKWARD: Final = "backward"
#: Runs again in the backward pass.
RECOMPUTED: Final = "recomputed"
#: A loop over the microbatches of a step of one stage.
MICROBATCHES: Final = "microbatches"
#: The loop over the microbatches of one stage of a pipeline.
STAGE: Final = "stage"
#: Runs layers in segments: a loop over segments, or over the layers of one, or what reads and writes rows of stacks.
SEGMENTS: Final = "segments"

MARKS: Final = (BACKWARD, FORWARD, MICROBATCHES, RECOMPUTED, SEGMENTS, STAGE)


def marks_of(*groups: Collection[str]) -> tuple[str, ...]:
    """All marks of some groups, sorted; what is marked as of both passes is of the backward pass."""
    marks = {mark for group in groups for mark in group}
    return tuple(sorted(marks - {FORWARD} if BACKWARD in marks else marks))


def phase_of(op: Operator, enclosing: str = "update") -> str:
    """ "forward", "backward" or "update".

    Args:
        op: an operator.
        enclosing: phase of the loop or branch that it is in; what is not marked belongs to it, and all of it does where
            that is the backward pass.
    """
    return phase_of_marks(op.marks, enclosing)


def phase_of_marks(marks: Collection[str], enclosing: str = "update") -> str:
    """Phase of an operator with these marks; see `phase_of`."""
    if enclosing == BACKWARD or BACKWARD in marks or RECOMPUTED in marks:
        return BACKWARD
    return FORWARD if FORWARD in marks else enclosing


def is_stage_loop(op: Operator) -> bool:
    """Whether an operator is the loop over the microbatches of one stage of a pipeline."""
    return STAGE in op.marks


def mark_problems(op: Operator) -> Iterator[str]:
    """Faults of the marks of an operator: unknown ones, and those that its primitive cannot have."""
    if list(op.marks) != sorted(set(op.marks)):
        yield f"marks are not sorted, each once: {', '.join(op.marks)}"
    yield from (f"{mark!r} is no mark: there are {', '.join(MARKS)}" for mark in op.marks if mark not in MARKS)
    if FORWARD in op.marks and BACKWARD in op.marks:
        yield "is marked as of the forward and of the backward pass"
    if {MICROBATCHES, STAGE}.intersection(op.marks) and op.primitive != "scan":
        yield f"{op.primitive} is marked as a loop over microbatches, which is a scan"
    if SEGMENTS in op.marks and op.primitive in CONTRACTIONS:
        yield f"{op.primitive} is marked as what runs layers in segments, which loops and reads of rows do"
