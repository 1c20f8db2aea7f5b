"""Integer programs of a graph whatever its memory limit and its microbatches in flight.

A stage is planned within one limit after another, and the stages of a kind differ in these two alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from autopar.cluster import LogicalMesh
from autopar.ir import Graph
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem, build
from autopar.search.intra.memory import IN_FLIGHT
from autopar.search.policy import StagePolicy
from autopar.search.problem import Problem
from autopar.search.problem_data import Asked
from autopar.solver import Solution, first_look
from autopar.solver.goal import PLAN_GAP, Goal
from autopar.solver.meter import Meter

#: Under which the memo of a search has what was built, and how many of these: a stage has levels of recomputation.
_BUILT, _MOST = "built", 4


def _asked(problem: Problem) -> Asked:
    """All of a problem but its memory limit, the meshes that it may take, the seconds that its plan must stay below and
    how many microbatches are in flight, where there are some."""
    asked = Asked.of(problem)
    # What may lie in host memory is measured by the limit.
    limit = None if problem.job.offload == "none" else problem.memory_limit_bytes
    # Looks and exact plans state the same.
    meshes = replace(problem.policy.meshes, looks_only=False)
    return replace(
        asked,
        job=replace(asked.job, memory_limit_bytes=limit, mesh_shape=None),
        policy=replace(asked.policy, meshes=meshes, stages=StagePolicy()),
        subproblem=replace(
            asked.subproblem,
            cutoff_s=math.inf,
            tried_stages=None,
            ample_memory=False,
            extra_in_flight=min(1, asked.subproblem.extra_in_flight),
        ),
    )


@dataclass(eq=False)
class BuiltProblems:
    """Built parts of one problem under any memory limit, with any number of microbatches in flight.

    Args:
        graph: of the problem.
        asked: of it.
        in_flight: microbatches in flight besides the one that runs, of which ``problems`` are.
        problems: by mesh, and whether phases make copies of their counted, under some limit.
        looks: without a limit, by mesh and the seconds to stay below.
        unlimited: likewise, solutions that begin from a look.
        key: of the graph and what is asked, the same in every process; None where something of it is a user's own.
        meters: by what is kept here what it took.
    """

    graph: Graph
    asked: Asked
    in_flight: int
    problems: dict[tuple[LogicalMesh, bool], ShardingProblem] = field(default_factory=dict)
    looks: dict[tuple[LogicalMesh, float], Solution | None] = field(default_factory=dict)
    unlimited: dict[tuple[LogicalMesh, float, Solution | None], Solution] = field(default_factory=dict)
    key: str | None = None
    meters: dict[Hashable, Meter] = field(default_factory=dict)

    def count(self, meter: Meter, what: tuple[Hashable, ...], name: str) -> None:
        """Counts what something that is kept here took, once in a search.

        Args:
            meter: of who asks for it.
            what: the key of its meter; the first time it is asked for it was computed.
            name: of it, the same in every process.
        """
        if self.key is not None:
            meter.keep(f"{self.key} {name}", self.meters[what])
        elif (counted := self.meters.get(what)) is not None:
            meter.merge(counted)
            self.meters[what] = Meter()

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        return sum(s.entries for s in self.problems.values())


@dataclass(eq=False)
class _LastBuilt:
    """The last built problems, the newest at the end."""

    problems: list[BuiltProblems] = field(default_factory=list)

    @property
    def entries(self) -> int:
        return sum(built.entries for built in self.problems)


def built_for(problem: Problem) -> BuiltProblems:
    """Built parts of a problem, shared with recent ones that differ in the limit and in microbatches in flight alone.

    Args:
        problem: to be sharded.
    """
    last, asked = problem.memo.get(_BUILT), _asked(problem)
    if not isinstance(last, _LastBuilt):
        last = _LastBuilt()
    for built in last.problems:
        if built.graph is problem.graph and built.asked == asked:
            return built
    in_flight, key = problem.subproblem.extra_in_flight, asked.key(problem.graph)
    built = BuiltProblems(problem.graph, asked, in_flight, key=key)
    problem.memo.keep(_BUILT, _LastBuilt([*last.problems[1 - _MOST :], built]))
    return built


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
    with clock.phase("program"):
        built = built_for(problem)
        if (mesh, split_phases) not in built.problems:
            known = replace(problem.subproblem, extra_in_flight=built.in_flight)
            counted = built.meters["problem", mesh, split_phases] = Meter()
            in_form = replace(problem, subproblem=known, meter=counted)
            built.problems[mesh, split_phases] = build(in_form, mesh, split_phases=split_phases)
        built.count(problem.meter, ("problem", mesh, split_phases), f"problem {mesh} {split_phases}")
        in_flight = problem.subproblem.extra_in_flight
        sharding_problem = with_in_flight(built.problems[mesh, split_phases], built.in_flight, in_flight)
        limited = replace(sharding_problem.problem, limit_bytes=float(problem.memory_limit_bytes), meter=problem.meter)
        return replace(sharding_problem, problem=limited)


def unlimited_look(problem: Problem, sharding_problem: ShardingProblem, cutoff_s: float) -> Solution | None:
    """A look at a mesh, whose phases share copies, without the memory limit."""
    built, key = built_for(problem), (sharding_problem.mesh, cutoff_s)
    if key not in built.looks:
        counted = built.meters["look", *key] = Meter()
        free = replace(sharding_problem.problem, limit_bytes=None, meter=counted)
        built.looks[key] = first_look(free, Goal(PLAN_GAP, cutoff_s))
    built.count(problem.meter, ("look", *key), f"look {sharding_problem.mesh} {cutoff_s!r}")
    return built.looks[key]
