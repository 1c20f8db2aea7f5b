"""The compiler in the loop: of the best plans of several kinds, the one whose compiled program is fastest and fits.

A step is planned again for less memory while its compiled program needs more than the limit: measured, not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from autopar.errors import InfeasiblePlanError
from autopar.plan import Considered, Plan
from autopar.plan.text import bytes_text, seconds_text
from autopar.search.policy import SearchPolicy

FormT = TypeVar("FormT")


class CompiledProgram(Protocol):
    """Compiled program with the bytes a device that it needs."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes of a device's memory that the compiled program needs."""


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
    policy: SearchPolicy,
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
    for _ in range(policy.stages.limit_attempts - 1):
        if best[0] <= limit_bytes:
            break
        margin = policy.compilation.margin
        aim = int(aim * min(margin, limit_bytes / program.footprint_bytes * margin))
        try:
            planned = search(aim)
        except InfeasiblePlanError:
            break
        program = build(planned)
        if program.footprint_bytes < best[0]:
            best = (program.footprint_bytes, planned, program)
    needed, planned, program = best
    content = planned.plan.content
    if needed > policy.compilation.tolerance * limit_bytes:
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


class TimedProgram(CompiledProgram, Protocol):
    """A program whose need of memory and time the compiler says."""

    @property
    def corrected_step_s(self) -> float:
        """Step time of the plan, with the compiler's estimates where it has some."""

    @property
    def corrections(self) -> str:
        """Seconds by group where the compiler and the plan differ, as text."""


TimedT = TypeVar("TimedT", bound=TimedProgram)


@dataclass(frozen=True)
class PlanKind(Generic[FormT]):
    """A kind of plan, as one stage or a pipeline, with the search for the best plan of this kind.

    Args:
        name: for people.
        search: from bytes a device to the best plan; raises InfeasiblePlanError where there is none.
    """

    name: str
    search: Callable[[int], Planned[FormT]]


@dataclass(frozen=True)
class _Candidate(Generic[FormT]):
    kind: PlanKind[FormT]
    planned: Planned[FormT]


def fastest_compiled(
    kinds: Sequence[PlanKind[FormT]],
    limit_bytes: int,
    build: Callable[[Planned[FormT]], TimedT],
    policy: SearchPolicy,
    target: str,
) -> tuple[Planned[FormT], TimedT]:
    """The plan whose compiled program keeps the limit and takes least time.

    The best few plans by predicted time are compiled, one of each kind. Where a program is above the limit its kind is
    planned again for less memory, as `build_within` does, but none may stay above it.

    Args:
        kinds: the first is what was asked for; it is always compiled.
        limit_bytes: bytes a device.
        build: compiles a plan.
        policy: how many are compiled.
        target: what they are compiled for, for the notes.

    Returns:
        The plan and its program. Notes say what was compiled and what was corrected; the search's considered options
        have a row of each.

    Raises:
        InfeasiblePlanError: no plan has a program within the limit.
    """
    strict = replace(policy, compilation=replace(policy.compilation, tolerance=1.0))
    by, rows = f"compiled for {target}", []
    built: list[tuple[str, Planned[FormT], TimedT]] = []
    refused: InfeasiblePlanError | None = None
    for candidate in _candidates(kinds, limit_bytes, policy):
        try:
            planned, program = build_within(candidate.planned, limit_bytes, build, candidate.kind.search, strict)
        except InfeasiblePlanError as error:
            refused = refused or error
            rows.append(Considered(candidate.kind.name, None, error.least_bytes, f"{by}: {error.fact}"))
            continue
        built.append((candidate.kind.name, planned, program))
        note = f"{by}: {seconds_text(planned.plan.step_time)}, {bytes_text(planned.plan.peak_memory)} predicted"
        rows.append(Considered(candidate.kind.name, program.corrected_step_s, program.footprint_bytes, note))
    if not built:
        assert refused is not None
        raise refused
    name, planned, program = min(built, key=lambda entry: entry[2].corrected_step_s)
    content = planned.plan.content
    notes = (*content.notes, *_notes(name, planned.plan, program, len(rows), target))
    search = msgspec.structs.replace(content.search, considered=(*content.search.considered, *rows))
    content = msgspec.structs.replace(content, notes=notes, search=search)
    return replace(planned, plan=replace(planned.plan, content=content)), program


def _candidates(kinds: Sequence[PlanKind[FormT]], limit_bytes: int, policy: SearchPolicy) -> list[_Candidate[FormT]]:
    """The first kind, and the fastest of the others whose plans differ and are not predicted much slower.

    Raises:
        InfeasiblePlanError: no kind has a plan.
    """
    candidates: list[_Candidate[FormT]] = []
    refused: InfeasiblePlanError | None = None
    for kind in kinds:
        try:
            candidates.append(_Candidate(kind, kind.search(limit_bytes)))
        except InfeasiblePlanError as error:
            refused = refused or error
    if not candidates:
        assert refused is not None
        raise refused
    first, *others = candidates
    most_s = policy.partition.near_best * min(c.planned.plan.step_time for c in candidates)
    different = [first]
    for c in sorted(others, key=lambda c: c.planned.plan.step_time):
        if c.planned.plan.step_time <= most_s and _meaning(c) not in [_meaning(known) for known in different]:
            different.append(c)
    return different[: policy.partition.most_near]


def _meaning(candidate: _Candidate[FormT]) -> tuple[object, ...]:
    """Facts in which plans differ: stages, microbatches, and all places."""
    content = candidate.planned.plan.content
    meshes = tuple((s.mesh_axes, s.devices, s.form.of_graph) for s in content.stages)
    return meshes, content.num_microbatches, content.schedule, content.inputs, content.operators


def _notes(name: str, plan: Plan, program: TimedProgram, compiled: int, target: str) -> list[str]:
    what = f"compiled for {target}: the fastest of {compiled} plans of different kinds, {name}"
    corrected_s, needed = program.corrected_step_s, program.footprint_bytes
    notes = [
        f"{what}; {seconds_text(corrected_s)} a step where {seconds_text(plan.step_time)} were predicted, "
        f"{bytes_text(needed)} a device where {bytes_text(plan.peak_memory)} were predicted"
    ]
    return [*notes, f"corrected by the compiler: {program.corrections}"] if program.corrections else notes
