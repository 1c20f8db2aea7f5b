"""Keeps a compiled program within the memory limit: what the compiler needs is measured, not only predicted."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan import PlanContent
from autopar.plan.text import bytes_text
from autopar.runtime import LocalProgram

# Programs compiled for one signature at most, and how far below the limit a new plan aims.
_ROUNDS = 4
_MARGIN = 0.98

# Of the limit: a program that needs a little more is taken, with a note; one that needs more than this is refused.
_TOLERANCE = 1.1


def build_within(
    content: PlanContent,
    limit_bytes: int | None,
    build: Callable[[PlanContent], LocalProgram],
    search: Callable[[int], PlanContent],
) -> tuple[PlanContent, LocalProgram]:
    """A plan and its program, planned again for less memory while the program needs more than the limit.

    Compilers schedule, fuse and copy as they like; their programs have needed from 0.95 to 1.5 times the bytes
    of the model. The prediction is scaled by what was measured, a few times.

    Args:
        content: the plan to begin with.
        limit_bytes: bytes a device that the user allows; None builds the plan as it is.
        build: compiles a plan.
        search: the plan for another limit; raises InfeasiblePlanError where there is none.

    Returns:
        The first plan whose program keeps the limit, else the one that needs least, with a note that says so.

    Raises:
        InfeasiblePlanError: all programs need more than a tenth above the limit.
    """
    local = build(content)
    if limit_bytes is None:
        return content, local
    best = (local.footprint_bytes, content, local)
    aim = limit_bytes
    for _ in range(_ROUNDS - 1):
        if best[0] <= limit_bytes:
            break
        aim = int(aim * min(_MARGIN, limit_bytes / local.footprint_bytes * _MARGIN))
        try:
            content = search(aim)
        except InfeasiblePlanError:
            break
        local = build(content)
        if local.footprint_bytes < best[0]:
            best = (local.footprint_bytes, content, local)
    needed, content, local = best
    if needed > _TOLERANCE * limit_bytes:
        raise InfeasiblePlanError(
            f"the least that a compiled program of {content.program} needed is {bytes_text(needed)} a device, "
            f"the limit is {bytes_text(limit_bytes)}",
            cause="the compiler keeps more at once than the plan, which fits by itself, asks for",
            remedy=f"memory_limit={needed}, more devices or microbatches, or donate_argnums for the state",
            least_bytes=needed,
        )
    if needed > limit_bytes:
        note = f"the compiled program needs {bytes_text(needed)} a device, above the limit of {bytes_text(limit_bytes)}"
        content = replace(content, notes=(*content.notes, note))
    return content, local
