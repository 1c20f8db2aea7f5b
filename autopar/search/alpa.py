"""The default strategy: the integer program on every logical mesh, the best of the answers (Alpa, OSDI'22)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from autopar.plan import Plan
from autopar.search.anytime import OfParts, faster_by
from autopar.search.intra import ShardingProblem
from autopar.search.intra.overlap_objective import with_state_hidden
from autopar.search.mesh_bounds import (
    LimitRelaxations,
    RelaxedMesh,
    all_relaxed,
    relaxation_within_limit,
    relaxations_within_limit,
    summed_cutoff_s,
    too_little,
)
from autopar.search.mesh_search import MeshSearch, MeshSolution
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.solver import Solution, Status, is_feasible, peak_bytes
from autopar.solver.goal import Goal

#: Of a mesh that is not solved.
_LEFT_OUT = "left out: its bound is above what is known"
_BY_PHASE = "memory binds, each phase gathers for itself"

_BOUND_OF_MESHES = "the bound of every mesh, priced on it"


def alpa(problem: Problem) -> Plan | Bounded:
    """The cheapest plan over all logical meshes of the cluster.

    Every mesh is relaxed first, which takes milliseconds. Then the one of the least bound is solved, and so on until
    the bounds of those that are left exceed what is known. `Bounded` where none takes less than ``cutoff_s`` of the
    sub-problem.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit; it has the least memory that would do.
    """
    meshes = MeshSearch(problem)
    if problem.subproblem.relaxation_only:
        return _by_relaxation(meshes)
    known_s = summed_cutoff_s(meshes)
    relaxed_meshes = all_relaxed(meshes, known_s)
    if problem.subproblem.ample_memory and not any(relaxed.fits for relaxed in relaxed_meshes):
        raise too_little(meshes, relaxed_meshes)
    answers = _Answers(meshes, known_s)
    first = min(
        (relaxed for relaxed in relaxed_meshes if relaxed.fits), key=lambda relaxed: relaxed.bound_s, default=None
    )
    if first is not None:
        answers.offer(first.sharding_problem, first.solution)
    within = relaxations_within_limit(meshes, relaxed_meshes, known_s, answers.offer)
    of_mesh = {i: answers.of_mesh(relaxed_meshes[i], within.get(i)) for i in _order(relaxed_meshes, within)}
    return answers.plan([answer for i in range(len(relaxed_meshes)) for answer in of_mesh[i]], relaxed_meshes)


def _order(relaxed_meshes: Sequence[RelaxedMesh], within: Mapping[int, LimitRelaxations]) -> list[int]:
    """Numbers of the meshes, those first that are likely to keep the limit, the cheapest first.

    What they take says which of the others are of use.
    """

    def key(i: int) -> tuple[bool, float, float, int]:
        relaxed = relaxed_meshes[i]
        cost_s = (
            within[i].cost_s
            if i in within
            else relaxed.solution.objective
            if relaxed.fits and relaxed.solution
            else 0.0
        )
        return not relaxed.fits, cost_s, relaxed.bound_s, i

    return sorted(range(len(relaxed_meshes)), key=key)


@dataclass
class _Answers:
    """Answers of meshes that are solved one after another.

    Args:
        meshes: what is planned.
        known_s: seconds that the sum of an answer must stay below to be of use.
        best_s: the least sum so far.
        unlimited_s: bounds without the limit, of meshes that may fit.
        offers: plans of relaxations, which may hide more of what they send than the answer of the least sum.
    """

    meshes: MeshSearch
    known_s: float
    best_s: float = math.inf
    unlimited_s: list[float] = field(default_factory=list)
    offers: list[Plan] = field(default_factory=list)

    def of_mesh(self, relaxed_mesh: RelaxedMesh, relaxations: LimitRelaxations | None) -> list[MeshSolution]:
        """The answers of a mesh; of one whose sum is near the best that of its relaxation, for its step may be shorter.

        Args:
            relaxed_mesh: the mesh without the limit.
            relaxations: of it within the limit; None where there are none.
        """
        if relaxed_mesh.bound_s == math.inf:
            return [_left_out(relaxed_mesh)]
        if relaxed_mesh.bound_s > min(self.best_s, self.known_s):
            self.unlimited_s.append(relaxed_mesh.bound_s)
            relaxed, near_s = relaxed_mesh.solution, self.meshes.near_s(min(self.best_s, self.known_s))
            if relaxed_mesh.fits and relaxed is not None and relaxed.objective <= near_s:
                return [MeshSolution(relaxed_mesh.sharding_problem, relaxed)]
            return [_left_out(relaxed_mesh)]
        if relaxations is not None and relaxations.is_useless(self.best_s, self.known_s):
            self.unlimited_s.append(relaxed_mesh.bound_s)
            return [_left_out(replace(relaxed_mesh, bound_s=max(relaxed_mesh.bound_s, relaxations.bound_s)))]
        self.meshes.problem.checkpoint()
        cutoff_s = min(self.best_s, self.known_s)
        free = self._without_limit(relaxed_mesh, cutoff_s)
        self.unlimited_s.append(free.solution.lower_bound)
        answers = [free]
        if free.sharding_problem.memory_bound:
            is_useful = free.solution.lower_bound <= cutoff_s and free.solution.status is not Status.INFEASIBLE
            answers = self._under_limit(free, relaxations) if is_useful else [_given_up(free)]
        self.best_s = min([self.best_s, *(a.solution.objective for a in answers if a.solution.found)])
        return answers

    def _without_limit(self, relaxed_mesh: RelaxedMesh, cutoff_s: float) -> MeshSolution:
        """The answer of a mesh without the limit; ``memory_bound`` where it breaks the limit, or was given up.

        Args:
            relaxed_mesh: the mesh.
            cutoff_s: seconds beyond which it is given up.
        """
        sharding_problem, limit_bytes = relaxed_mesh.sharding_problem, self.meshes.problem.memory_limit_bytes
        free = self.meshes.unlimited(sharding_problem, relaxed_mesh.solution, cutoff_s)
        given_up = free.status is not Status.OPTIMAL and free.lower_bound > cutoff_s
        fits = free.found and not given_up and peak_bytes(sharding_problem.problem, free.choice) <= limit_bytes
        return MeshSolution(sharding_problem if fits else replace(sharding_problem, memory_bound=True), free)

    def _under_limit(self, free: MeshSolution, relaxations: LimitRelaxations | None) -> list[MeshSolution]:
        """Answers within the limit: with copies that all phases share, and with copies of each phase's own.

        The second cost no less than the first without a limit, for they are made more often; where the first within the
        limit costs next to nothing more than that, they are not tried. Separate programs have the second alone.

        Args:
            free: the answer without the limit.
            relaxations: of the mesh within the limit, where there were some already.
        """
        meshes, best_s, known_s, shared = self.meshes, self.best_s, self.known_s, free.sharding_problem
        if meshes.problem.subproblem.separate_programs:
            known = (
                meshes.within(shared, free.solution.lower_bound, known_s) if relaxations is None else relaxations.shared
            )
            solution = meshes.solved(shared.problem, known=known, binds=True, cutoff_s=known_s)
            return [MeshSolution(replace(shared, memory_bound=True), solution, _BY_PHASE)]
        least_s = free.solution.lower_bound
        negligible_s = least_s + meshes.problem.policy.effort.gap * abs(least_s)
        if relaxations is None:
            relaxations = relaxation_within_limit(meshes, shared, least_s=least_s, best_s=best_s, known_s=known_s)
            for of, relaxed in relaxations.forms(shared):
                self.offer(of, relaxed)
        # Which of the two forms is the cheaper relaxations say: the other is mostly given up by its bound.
        split, split_relaxed = relaxations.split, relaxations.split_relaxed
        cutoff_s = min(best_s, known_s, math.inf if split_relaxed is None else split_relaxed.objective)
        solution = meshes.solved(shared.problem, known=relaxations.shared, binds=True, cutoff_s=cutoff_s)
        answers = [MeshSolution(shared, solution, "memory binds")]
        if solution.objective <= negligible_s:
            return answers
        split = split or meshes.program(shared.mesh, split_phases=True)
        cutoff_s = min(known_s, relaxations.times_joined * min(best_s, solution.objective))
        solution = meshes.solved(split.problem, known=split_relaxed, binds=True, cutoff_s=cutoff_s)
        return [*answers, MeshSolution(split, solution, _BY_PHASE)]

    def offer(self, sharding_problem: ShardingProblem, relaxed: Solution | None) -> None:
        """Offers the plan of a relaxation that keeps the limit while its mesh is not solved; no part of a step."""
        problem = self.meshes.problem
        if problem.anytime is None or isinstance(problem.anytime, OfParts):
            return
        done = Goal(problem.policy.effort.sharding_gap)
        if relaxed is None or not relaxed.found or done.reached(relaxed.objective, relaxed.lower_bound):
            return
        if is_feasible(sharding_problem.problem, relaxed.choice):
            self.offers.append(MeshSearch(problem).plan([MeshSolution(sharding_problem, relaxed)], "alpa"))
            problem.offer(self.offers[-1])

    def plan(self, every: Sequence[MeshSolution], relaxed_meshes: Sequence[RelaxedMesh]) -> Plan | Bounded:
        """The plan of the best answer, or of an offer that is faster; `Bounded` where no bound is below what is known.

        Args:
            every: answers of all meshes.
            relaxed_meshes: their relaxations.
        """
        cheapest_s, known_s = min(self.unlimited_s, default=math.inf), self.known_s
        if self.unlimited_s and cheapest_s >= known_s:
            return Bounded(_BOUND_OF_MESHES, cheapest_s)
        if self.unlimited_s and not any(a.solution.found and a.solution.lower_bound < known_s for a in every):
            useless = [a.solution.lower_bound for a in every if a.solution.lower_bound >= known_s]
            if any(map(math.isfinite, useless)):
                return Bounded(_BOUND_OF_MESHES, min(useless))
        plan = self.meshes.plan(every, "alpa", improves=True)
        offered = min(self.offers, key=lambda plan: plan.step_time, default=None)
        plan = faster_by(plan, offered, self.meshes.problem.policy.effort.least_gain)
        other = self._on_another_mesh(relaxed_meshes, plan)
        plan = faster_by(plan, other, self.meshes.problem.policy.effort.least_gain)
        complete = len(self.unlimited_s) == len(relaxed_meshes)
        return _with_unlimited(plan, cheapest_s) if plan.content.memory_bound and complete else plan

    def _on_another_mesh(self, relaxed_meshes: Sequence[RelaxedMesh], plan: Plan) -> Plan | None:
        """The plan of the mesh on which a step is shorter than on that of the least sum; None where there is none.

        Sums have the latency of each collective, where those that are sent as one wait for one, and what computation
        hides. So a mesh may be left out by its bound though a step on it is the shortest. On each the answer is timed
        for which conversions of the state are hidden. A plan near its bound is left as it is. One that is far from it
        waits, or its devices compute the same in place of waiting.
        """
        problem, stage, search = self.meshes.problem, plan.stages[0], plan.content.search
        is_near = plan.step_time <= (1 + problem.policy.effort.large_gap) * (search.lower_bound or 0.0)
        if not problem.cost_model.overlaps or is_near:
            return None
        fastest, fastest_s = None, plan.step_time
        for relaxed in relaxed_meshes:
            program = relaxed.sharding_problem
            if relaxed.bound_s == math.inf or tuple(program.mesh.axes) == stage.mesh_axes:
                continue
            problem.checkpoint()
            start = with_state_hidden(problem, program, self.meshes.improved, relaxed.bound_s)
            if start is None or not is_feasible(program.problem, start.solution.choice):
                continue
            if start.step_s < fastest_s:
                fastest, fastest_s = MeshSolution(program, start.solution), start.step_s
        if fastest is None:
            return None
        faster = MeshSearch(problem).plan([fastest], "alpa", improves=True)
        program = fastest.sharding_problem
        left_out = f"mesh {program.mesh}, {_LEFT_OUT}"
        rows = (c for c in search.considered if c.name != left_out)
        rows = (msgspec.structs.replace(c, note="") if c.note == "chosen" else c for c in rows)
        bound_s = None if search.lower_bound is None else min(search.lower_bound, faster.step_time)
        considered = (*faster.content.search.considered, *rows)
        # The program made the least sum least; the plan is taken for its step.
        least_s = min(search.objective, faster.content.search.objective)
        record = msgspec.structs.replace(
            faster.content.search, objective=least_s, lower_bound=bound_s, considered=considered
        )
        return replace(faster, content=msgspec.structs.replace(faster.content, search=record))


def _with_unlimited(plan: Plan, seconds: float) -> Plan:
    """A plan whose record says how long a step takes at least without the memory limit."""
    search = msgspec.structs.replace(plan.content.search, unlimited_s=seconds)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def _by_relaxation(meshes: MeshSearch) -> Plan | Bounded:
    """The plan of the meshes' relaxations within the memory limit; of a problem too small for one its answer.

    `Bounded` where none takes less than ``cutoff_s`` of the sub-problem, however much memory there is.

    Raises:
        InfeasiblePlanError: no relaxation finds what fits.
    """
    problem, answers, least_s = meshes.problem, list[MeshSolution](), math.inf
    # Communication that computation hides is in a sum, and not in a step.
    cutoff_s, bounds_s = problem.policy.partition.near_best * problem.subproblem.cutoff_s, list[float]()
    gap = problem.policy.effort.estimate_gap
    for mesh in meshes.meshes:
        problem.checkpoint()
        sharding_problem, fits = meshes.program(mesh), False
        if not answers:
            meshes.check_room(sharding_problem)
        if sharding_problem.broken:
            answers.append(_left_out(RelaxedMesh(sharding_problem, None, math.inf)))
            continue
        relaxed = None
        if not problem.subproblem.any_that_fits:  # else nobody asks what the limit costs
            relaxed = meshes.free(sharding_problem, cutoff_s, gap)
            bounds_s.append(relaxed.lower_bound)
            if relaxed.lower_bound >= cutoff_s:
                answers.append(_left_out(RelaxedMesh(sharding_problem, relaxed, relaxed.lower_bound)))
                continue
            least_s, fits = min(least_s, relaxed.objective), is_feasible(sharding_problem.problem, relaxed.choice)
        if relaxed is None or not fits:
            known_s = -math.inf if relaxed is None else relaxed.lower_bound
            relaxed = meshes.within(sharding_problem, known_s, gap=gap) or meshes.solved(sharding_problem.problem)
        answers.append(MeshSolution(replace(sharding_problem, memory_bound=not fits), relaxed))
    if bounds_s and min(bounds_s) >= cutoff_s:
        return Bounded(_BOUND_OF_MESHES, min(bounds_s))
    plan = meshes.plan(answers, "alpa")
    return _with_unlimited(plan, plan.content.search.objective if least_s == math.inf else least_s)


def _left_out(relaxed_mesh: RelaxedMesh) -> MeshSolution:
    """Record of a mesh that is not solved: its bound is above a known plan, or nothing fits on it."""
    sharding_problem = replace(relaxed_mesh.sharding_problem, memory_bound=True)
    if relaxed_mesh.bound_s == math.inf:
        return MeshSolution(sharding_problem, Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, ""))
    return MeshSolution(
        sharding_problem, Solution(Status.UNKNOWN, (), math.inf, relaxed_mesh.bound_s, 0.0, ""), _LEFT_OUT
    )


def _given_up(answer: MeshSolution) -> MeshSolution:
    """Record of a mesh whose bound without a limit is above a known plan."""
    if answer.solution.status is Status.INFEASIBLE:
        return answer
    solution = replace(answer.solution, status=Status.UNKNOWN, choice=(), objective=math.inf)
    return replace(answer, solution=solution, note=_LEFT_OUT)
