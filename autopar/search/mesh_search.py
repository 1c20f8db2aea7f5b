"""`MeshSearch`: the shardings of one problem on its logical meshes, from statement to plan.

    program     the choice problem of a mesh
    relaxed     a choice and a bound without the memory limit, in milliseconds
    free        the same; of a problem that is too small for one its answer
    within      likewise within the limit
    unlimited   the answer without the limit
    solved      the answer of a choice problem, up to the gap of plans
    plan        the plan of the answer of the shortest step

The first three and `unlimited` are kept in the store of the search whatever the memory limit: a stage is planned within
one limit after another, and the stages of a kind differ in limits and in microbatches in flight alone. `within` is kept
by limit: a stage that is relaxed may be planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.cluster import LogicalMesh
from autopar.errors import InfeasiblePlanError
from autopar.plan import Considered, Plan, SearchContent
from autopar.plan.text import bytes_text
from autopar.search.assemble import assemble, step_bound_s
from autopar.search.clock import Clock
from autopar.search.constraints import meshes_that_hold
from autopar.search.intra import Sharding, ShardingProblem, build, extract
from autopar.search.intra.host import least_device_memory
from autopar.search.intra.memory import IN_FLIGHT
from autopar.search.intra.overlap_objective import TimedSolution, improve_overlap, step_s
from autopar.search.intra.thresholds import with_thresholds
from autopar.search.intra.timeline import details_of
from autopar.search.outcome import NoRoomError
from autopar.search.problem import Problem
from autopar.search.problem_data import without_room
from autopar.solver import ChoiceProblem, HighsSolver, Solution, is_feasible, solve, solve_relaxed
from autopar.solver.goal import Goal
from autopar.solver.highs import MOST_NODES
from autopar.solver.memory import evenly_split_bytes, memory_floor
from autopar.solver.meter import Meter
from autopar.solver.solve import LARGE


@dataclass(frozen=True)
class MeshSolution:
    """A mesh with its integer program and the solution; ``solution.choice`` is empty where nothing fits.

    ``note`` says under which restriction, next to the mesh.
    """

    sharding_problem: ShardingProblem
    solution: Solution
    note: str = ""


@dataclass(frozen=True)
class _Statement:
    """A stated problem, of so many microbatches in flight besides the one that runs."""

    sharding_problem: ShardingProblem
    in_flight: int

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        return self.sharding_problem.entries


@dataclass(frozen=True)
class MeshSearch:
    """The shardings of a problem on its logical meshes.

    Args:
        problem: what is planned.
        clock: takes the time.
    """

    problem: Problem
    clock: Clock = field(default_factory=Clock)

    @property
    def meshes(self) -> tuple[LogicalMesh, ...]:
        """Meshes that may be taken."""
        problem = self.problem
        every = problem.cluster.logical_meshes(problem.job.mesh_shape)
        return meshes_that_hold(every, problem.graph, problem.job.constraints)

    def program(self, mesh: LogicalMesh, *, split_phases: bool = False) -> ShardingProblem:
        """The choice problem of a mesh within the limit, stated or as it was stated for another limit.

        Args:
            mesh: the logical mesh.
            split_phases: whether each phase makes its own copies of values in other layouts, as gathered parameters.
        """
        problem, in_flight = self.problem, self.problem.subproblem.extra_in_flight

        def make(meter: Meter) -> _Statement:
            return _Statement(build(replace(problem, meter=meter), mesh, split_phases=split_phases), in_flight)

        with self.clock.phase("program"):
            known = without_room(problem, "statement", (mesh, split_phases), make)
            built = with_in_flight(known.sharding_problem, known.in_flight, in_flight)
            limited = replace(built.problem, limit_bytes=float(problem.memory_limit_bytes), meter=problem.meter)
            return replace(built, problem=limited)

    def check_room(self, sharding_problem: ShardingProblem) -> None:
        """Raises `NoRoomError` where the statement of one mesh says that none has room.

        Where the error is to say how much memory would do, the other meshes are stated first.
        """
        problem = self.problem
        if problem.reporting.explains_infeasible or sharding_problem.broken:
            return
        least = evenly_split_bytes(sharding_problem.problem.usages, problem.cluster.num_devices)
        if least > problem.memory_limit_bytes:
            error = infeasible(problem, [sharding_problem])
            raise NoRoomError(error.fact, cause=error.cause, remedy=error.remedy, least_bytes=math.ceil(least))

    def relaxed(
        self, sharding_problem: ShardingProblem, cutoff_s: float = math.inf, gap: float | None = None
    ) -> Solution | None:
        """The relaxation of a mesh, whose phases share copies, without the limit; None where a proof takes as long.

        Args:
            sharding_problem: of the mesh.
            cutoff_s: seconds from which it is of no use.
            gap: relative gap between cost and bound that is small enough; None for that of plans.
        """

        def make(meter: Meter) -> Solution | None:
            free = replace(sharding_problem.problem, limit_bytes=None, meter=meter)
            return solve_relaxed(free, Goal(wanted, cutoff_s, alone=alone))

        alone, wanted = self.problem.is_alone, self._gap(gap)
        with self.clock.phase("solve"):
            return without_room(self.problem, "relaxed", (sharding_problem.mesh, wanted, alone), make, cutoff_s)

    def within(
        self,
        sharding_problem: ShardingProblem,
        least_s: float,
        cutoff_s: float = math.inf,
        gap: float | None = None,
    ) -> Solution | None:
        """The relaxation of a mesh within the memory limit; None where a proof takes as long.

        Args:
            sharding_problem: of the mesh, whose phases share copies or are programs of their own.
            least_s: no choice without the limit costs less; -inf where that is not known.
            cutoff_s: seconds from which it is of no use.
            gap: relative gap between cost and bound that is small enough; None for that of plans.
        """

        def make(meter: Meter) -> Solution | None:
            limited = replace(sharding_problem.problem, meter=meter)
            return solve_relaxed(limited, Goal(wanted, cutoff_s, least=least_s))

        problem, wanted = self.problem, self._gap(gap)
        room = (problem.memory_limit_bytes, problem.subproblem.extra_in_flight)
        of = (sharding_problem.mesh, wanted, least_s, *room)
        with self.clock.phase("solve"):
            return without_room(problem, "relaxed within the limit", of, make, cutoff_s)

    def _gap(self, gap: float | None) -> float:
        return self.problem.policy.effort.sharding_gap if gap is None else gap

    def free(self, sharding_problem: ShardingProblem, cutoff_s: float = math.inf, gap: float | None = None) -> Solution:
        """The relaxation of a mesh without the memory limit, or the exact answer where that takes no longer.

        Args:
            sharding_problem: of the mesh, whose phases share copies.
            cutoff_s: seconds from which it is of no use.
            gap: relative gap between cost and bound that is small enough; None for that of plans.
        """
        relaxed = self.relaxed(sharding_problem, cutoff_s, gap)
        return self.unlimited(sharding_problem, None) if relaxed is None else relaxed

    def unlimited(
        self, sharding_problem: ShardingProblem, relaxed: Solution | None, cutoff_s: float = math.inf
    ) -> Solution:
        """The answer of a mesh, whose phases share copies, without the limit.

        Args:
            sharding_problem: of the mesh.
            relaxed: its relaxation without the limit, where there is one.
            cutoff_s: seconds from which it is given up.
        """

        def make(meter: Meter) -> Solution:
            choices = replace(sharding_problem.problem, limit_bytes=None, meter=meter)
            return self.solved(choices, known=relaxed, cutoff_s=cutoff_s)

        known_s = (math.inf, -math.inf) if relaxed is None else (relaxed.objective, relaxed.lower_bound)
        with self.clock.phase("solve"):
            return without_room(
                self.problem,
                "unlimited",
                (sharding_problem.mesh, cutoff_s, *known_s, self._gap(None), self.problem.is_alone),
                make,
            )

    def solved(
        self,
        choices: ChoiceProblem,
        *,
        known: Solution | None = None,
        binds: bool = False,
        cutoff_s: float = math.inf,
        gap: float | None = None,
    ) -> Solution:
        """The cheapest choice, up to a gap that no plan is worth waiting for.

        Args:
            choices: the problem of a mesh.
            known: its relaxation.
            binds: whether its memory limit is known to bind.
            cutoff_s: seconds from which it is of no use.
            gap: relative gap between cost and bound that is small enough; None for that of plans.
        """
        problem = self.problem
        with self.clock.phase("solve"):
            return solve(
                choices,
                HighsSolver(max_nodes=MOST_NODES),
                time_limit_s=problem.solving.time_limit_s,
                seed=problem.solving.seed,
                known=known,
                binds=binds,
                goal=Goal(self._gap(gap), cutoff_s, alone=problem.is_alone),
            )

    def improved(self, choices: ChoiceProblem, start: tuple[int, ...], *, binds: bool = False) -> Solution:
        """A choice that is at least as cheap as ``start``, without a proof: of large problems by relaxation.

        Args:
            choices: the problem.
            start: a choice that fits; empty for none.
            binds: whether the limit of the same choices at other costs bound: then only relaxations within it are made.
        """
        goal = Goal(self.problem.policy.effort.estimate_gap)
        if choices.columns <= LARGE:
            return self.solved(choices, binds=True)
        if binds:
            return solve_relaxed(choices, goal, start or None) or self.solved(choices, binds=True)
        free = solve_relaxed(replace(choices, limit_bytes=None), goal, start or None)
        if free is None:
            return self.solved(choices, binds=True)
        if is_feasible(choices, free.choice):
            return free
        return solve_relaxed(choices, replace(goal, least=free.lower_bound), start or None) or free

    def step_s(self, sharding_problem: ShardingProblem, solution: Solution) -> float:
        """Seconds of a step of a choice, with what is hidden."""
        with self.clock.phase("extract"):
            return step_s(extract(self.problem, sharding_problem, solution.choice))

    def near_s(self, seconds: float) -> float:
        """The largest sum that is near another: within the gap of the search the order of steps is not that of sums.

        Args:
            seconds: the other sum.
        """
        return (1 + self.problem.policy.effort.gap) * seconds

    def plan(
        self,
        answers: Sequence[MeshSolution],
        name: str,
        *,
        improves: bool = False,
    ) -> Plan:
        """The plan of the answer of the shortest step.

        Args:
            answers: on meshes.
            name: of the strategy.
            improves: whether the problem of the best mesh is solved again with what computation hides.

        Raises:
            InfeasiblePlanError: none of them has a choice.
        """
        problem, clock = self.problem, self.clock
        if not any(a.solution.found for a in answers):
            raise infeasible(problem, [a.sharding_problem for a in answers])
        with clock.phase("extract"):
            shardings = [
                extract(problem, a.sharding_problem, a.solution.choice) if a.solution.found else None for a in answers
            ]
            # Where copies are priced for each phase some of them are found to be one: what is left is what counts.
            _, _, first, sharding = min(
                (
                    (step_s(s), str(a.sharding_problem.mesh), a, s)
                    for a, s in zip(answers, shardings, strict=True)
                    if s is not None
                ),
                key=lambda ranked: ranked[:2],
            )
            taken = TimedSolution(first.solution, sharding)
            if improves:
                improve = partial(self.improved, binds=first.sharding_problem.memory_bound)
                taken = improve_overlap(problem, first.sharding_problem, taken, improve)
            sharding = with_thresholds(problem, first.sharding_problem, taken.solution.choice, taken.sharding)
            considered = tuple(
                Considered(
                    f"mesh {a.sharding_problem.mesh}" + (f", {a.note}" if a.note else ""),
                    a.solution.objective if a.solution.found else None,
                    None if s is None else s.memory.total,
                    "chosen" if a is first else a.solution.status.value,
                )
                for a, s in zip(answers, shardings, strict=True)
            )
            bounds = (step_bound_s(problem, a.sharding_problem, a.solution.lower_bound) for a in answers)
            bound = min(math.inf if s is None else s for s in bounds)
        bound_s = None if math.isinf(bound) else float(bound)
        search = SearchContent(name, taken.solution.objective, bound_s, considered)
        return self.assembled(first.sharding_problem, taken.solution.choice, sharding, search)

    def assembled(
        self, sharding_problem: ShardingProblem, choice: Sequence[int], sharding: Sharding, search: SearchContent
    ) -> Plan:
        """The plan of a choice, with the details of its step.

        Args:
            sharding_problem: of its mesh.
            choice: the choice.
            sharding: that it is.
            search: record of the search.
        """
        plan = assemble(self.problem, sharding_problem, choice, sharding, search, self.clock)
        return replace(plan, details=details_of(self.problem, sharding_problem, choice, sharding))


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


def infeasible(problem: Problem, problems: Sequence[ShardingProblem]) -> InfeasiblePlanError:
    """The error that says how much memory would do, or a bound of it."""
    limit = problem.memory_limit_bytes
    floors = sorted(((memory_floor(s.problem), s) for s in problems), key=lambda p: p[0])
    least, reason = max(floors[0][0], limit + 1.0), "it needs more"
    if problem.reporting.explains_infeasible:
        least = math.inf
        for floor, s in floors:
            if floor < least:
                least = min(least, least_device_memory(s.problem, s.usages))
        reason = f"the least that would do is {bytes_text(least)} ({math.ceil(least)} bytes)"
    return InfeasiblePlanError(
        f"{problem.graph.name} does not fit {bytes_text(limit)} a device on {problem.cluster.name}; {reason}",
        cause="parameters, optimizer state and activations, split over all devices, need more than the limit",
        remedy="raise memory_limit, use more devices, a smaller batch, donate_argnums for the state, jax.checkpoint, "
        "or offload='auto' where the cluster gives host_bandwidth",
        least_bytes=math.ceil(least),
    )
