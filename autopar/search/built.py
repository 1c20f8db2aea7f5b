"""Integer programs of a graph whatever its memory limit and its microbatches in flight, and looks without the limit.

A stage is planned within one limit after another, and the stages of a kind differ in these two alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.cluster import LogicalMesh
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem, build
from autopar.search.intra.memory import IN_FLIGHT
from autopar.search.policy import StagePolicy
from autopar.search.problem import Problem
from autopar.search.problem_data import Conditions, in_any_room
from autopar.search.store import Key
from autopar.solver import Solution, first_look
from autopar.solver.goal import PLAN_GAP, Goal
from autopar.solver.meter import Meter

Value = TypeVar("Value")


def _conditions(problem: Problem) -> Conditions:
    """Conditions of what is stated of a problem on any mesh: looks and exact plans state the same."""
    known = in_any_room(problem)
    meshes = replace(problem.policy.meshes, looks_only=False)
    policy = replace(known.policy, meshes=meshes, stages=StagePolicy())
    return replace(known, job=replace(known.job, mesh_shape=None), policy=policy)


def without_room(problem: Problem, what: str, of: tuple[Hashable, ...], make: Callable[[Meter], Value]) -> Value:
    """An answer about a problem that does not depend on its memory limit; its work counts once in a search.

    Args:
        problem: to be sharded.
        what: kind of answer.
        of: everything that it depends on besides the problem.
        make: makes it, and counts its work.
    """
    return problem.store.counted(key_without_room(problem, what, *of), problem.meter, make)


def key_without_room(problem: Problem, what: str, *of: Hashable) -> Key:
    """Key of an answer as of `without_room`."""
    return problem.store.key(what, problem.graph, _conditions(problem), *of)


@dataclass(frozen=True)
class _Statement:
    """A stated problem, of so many microbatches in flight besides the one that runs."""

    sharding_problem: ShardingProblem
    in_flight: int

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        return self.sharding_problem.entries


def with_in_flight(built: ShardingProblem, before: int, after: int) -> ShardingProblem:
    """A problem with another number of microbatches in flight, each of which takes as much.

    Args:
        built: the problem.
        before: microbatches in flight besides the one that runs, of ``built``.
        after: those of the answer; 0 where ``before`` is.
    """
    if before == after:
        return built
    drafts = tuple(replace(u, bytes=after * (u.bytes / before)) if u.kind == IN_FLIGHT else u for u in built.usages)
    usages = tuple(
        known if draft is old else replace(known, bytes=draft.bytes)
        for known, old, draft in zip(built.problem.usages, built.usages, drafts, strict=True)
    )
    return replace(built, problem=replace(built.problem, usages=usages), usages=drafts)


def sharding_problem_of(problem: Problem, mesh: LogicalMesh, clock: Clock, *, split_phases: bool) -> ShardingProblem:
    """The stated problem of a mesh within the limit of ``problem``, built or as it was built for a like one.

    Args:
        problem: to be sharded.
        mesh: the logical mesh.
        clock: takes the time.
        split_phases: see `build`.
    """
    in_flight = problem.subproblem.extra_in_flight

    def make(meter: Meter) -> _Statement:
        return _Statement(build(replace(problem, meter=meter), mesh, split_phases=split_phases), in_flight)

    with clock.phase("program"):
        known = without_room(problem, "statement", (mesh, split_phases), make)
        sharding_problem = with_in_flight(known.sharding_problem, known.in_flight, in_flight)
        limited = replace(sharding_problem.problem, limit_bytes=float(problem.memory_limit_bytes), meter=problem.meter)
        return replace(sharding_problem, problem=limited)


def unlimited_look(problem: Problem, sharding_problem: ShardingProblem, cutoff_s: float) -> Solution | None:
    """A look at a mesh, whose phases share copies, without the memory limit."""

    def look(meter: Meter) -> Solution | None:
        free = replace(sharding_problem.problem, limit_bytes=None, meter=meter)
        return first_look(free, Goal(PLAN_GAP, cutoff_s, alone=problem.is_alone))

    return without_room(problem, "look", (sharding_problem.mesh, cutoff_s, problem.is_alone), look)
