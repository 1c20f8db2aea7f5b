"""Plans a step again for less memory while its compiled program needs more than the limit: measured, not predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.plan.text import bytes_text
from autopar.search.policy import CompilationPolicy

FormT = TypeVar("FormT")


class CompiledProgram(Protocol):
    """Compiled program with the bytes a device that it needs."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device."""


ProgramT = TypeVar("ProgramT", bound=CompiledProgram)


@dataclass(frozen=True)
class Planned(Generic[FormT]):
    """A plan, and the function in the form that it was made for: in its number of microbatches, for one stage."""

    traced: FormT
    plan: Plan


def build_within(
    planned: Planned[FormT],
    limit_bytes: int | None,
    build: Callable[[Planned[FormT]], ProgramT],
    search: Callable[[int], Planned[FormT]],
    policy: CompilationPolicy,
) -> tuple[Planned[FormT], ProgramT]:
    """A plan and its program, planned again for less memory while the program needs more than the limit.

    Compilers schedule, fuse and copy as they like; their programs have needed from 0.95 to 1.5 times the bytes
    of the model. The prediction is scaled by what was measured, a few times. All that was free is free again: less
    memory may take more microbatches, recomputation, or more stages.

    Args:
        planned: the plan to begin with.
        limit_bytes: bytes a device that the user allows; None builds the plan as it is.
        build: compiles a plan.
        search: the plan for another limit; raises InfeasiblePlanError where there is none.
        policy: how often, and how far above the limit a program may be.

    Returns:
        The first plan whose program keeps the limit, else the one that needs least, with a note that says so.

    Raises:
        InfeasiblePlanError: all programs need more than the tolerated times the limit.
    """
    program = build(planned)
    if limit_bytes is None:
        return planned, program
    best = (program.footprint_bytes, planned, program)
    aim = limit_bytes
    for _ in range(policy.most_programs - 1):
        if best[0] <= limit_bytes:
            break
        aim = int(aim * min(policy.margin, limit_bytes / program.footprint_bytes * policy.margin))
        try:
            planned = search(aim)
        except InfeasiblePlanError:
            break
        program = build(planned)
        if program.footprint_bytes < best[0]:
            best = (program.footprint_bytes, planned, program)
    needed, planned, program = best
    content = planned.plan.content
    if needed > policy.tolerance * limit_bytes:
        raise InfeasiblePlanError(
            f"the least that a compiled program of {content.program} needed is {bytes_text(needed)} a device, "
            f"the limit is {bytes_text(limit_bytes)}",
            cause="the compiler keeps more at once than the plan, which fits by itself, asks for",
            remedy=f"memory_limit={needed}, more devices or microbatches, or donate_argnums for the state",
            least_bytes=needed,
        )
    # The plan may have been made for less than the limit.
    notes = content.notes
    if needed > limit_bytes:
        text = f"the compiled program needs {bytes_text(needed)} a device, above the limit of {bytes_text(limit_bytes)}"
        notes = (*notes, text)
    content = msgspec.structs.replace(content, notes=notes, memory_limit=limit_bytes)
    return replace(planned, plan=replace(planned.plan, content=content)), program
