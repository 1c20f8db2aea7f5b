"""The default strategy: the integer program on every logical mesh, the best of the answers (Alpa, OSDI'22)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from autopar.errors import InfeasiblePlanError
from autopar.plan import Considered, Plan, SearchContent
from autopar.plan.text import bytes_text
from autopar.search.anytime import OfParts, faster_by
from autopar.search.assemble import assemble, step_bound_s
from autopar.search.built import sharding_problem_of, without_room
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem, extract
from autopar.search.intra.host import least_device_memory
from autopar.search.intra.slack import Hidden, hide, step_s
from autopar.search.intra.thresholds import with_thresholds
from autopar.search.intra.timeline import details_of
from autopar.search.limit_looks import LimitLooks, look_within_limit, looks_within_limit
from autopar.search.looks import Looked, all_looked_at, meshes_of, solve_mesh, summed_cutoff_s, too_little
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem, Solution, Status, first_look, is_feasible, peak_bytes
from autopar.solver.goal import Goal
from autopar.solver.memory import memory_floor
from autopar.solver.meter import Meter
from autopar.solver.solve import LARGE

#: Of a mesh that is not solved.
_LEFT_OUT = "left out: its bound is above what is known"

_BOUND_OF_MESHES = "the bound of every mesh, priced on it"


@dataclass(frozen=True)
class MeshSolution:
    """A mesh with its stated problem and solution; ``solution.choice`` is empty where nothing fits.

    ``note`` says under which restriction, next to the mesh.
    """

    sharding_problem: ShardingProblem
    solution: Solution
    note: str = ""


def alpa(problem: Problem) -> Plan | Bounded:
    """The cheapest plan over all logical meshes of the cluster.

    Every mesh is looked at first, which takes milliseconds. Then the one of the least bound is solved, and so on until
    the bounds of those that are left exceed what is known. `Bounded` where none takes less than ``cutoff_s`` of the
    sub-problem.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit; it has the least memory that would do.
    """
    clock = Clock()
    if problem.policy.meshes.looks_only:
        return _looked(problem, clock)
    meshes = meshes_of(problem)
    known_s = summed_cutoff_s(problem, meshes, clock)
    looked = all_looked_at(problem, meshes, known_s, clock)
    if problem.subproblem.ample_memory and not any(look.fits for look in looked):
        raise too_little(problem, looked)
    offers = _first_offered(problem, looked)
    answers, unlimited, best = dict[int, list[MeshSolution]](), dict[int, float](), math.inf

    def offer(sharding_problem: ShardingProblem, look: Solution | None) -> None:
        """Offers the plan of a look."""
        offers.extend(_offered(problem, sharding_problem, look))

    within = looks_within_limit(problem, looked, known_s, clock, offer)

    for i in _order(looked, within):
        answers[i] = [_left_out(looked[i])]
        if looked[i].bound_s == math.inf:
            continue
        unlimited[i] = looked[i].bound_s
        if looked[i].bound_s > min(best, known_s):
            continue
        if i in within and within[i].is_useless(best, known_s):
            answers[i] = [_left_out(replace(looked[i], bound_s=max(looked[i].bound_s, within[i].bound_s)))]
            continue
        problem.checkpoint()
        free = _without_limit(problem, looked[i], clock, min(best, known_s))
        unlimited[i] = free.solution.lower_bound
        answers[i] = [free]
        if free.sharding_problem.memory_bound:
            useful = free.solution.lower_bound <= min(best, known_s) and free.solution.status is not Status.INFEASIBLE
            limited = useful and _under_limit(problem, free, clock, best, known_s, offers, within.get(i))
            answers[i] = limited or [_given_up(free)]
        best = min([best, *(a.solution.objective for a in answers[i] if a.solution.found)])
    every = [answer for i in range(len(looked)) for answer in answers[i]]
    cheapest = min(unlimited.values(), default=math.inf)
    if (bounded := _useless(unlimited, every, known_s)) is not None:
        return bounded
    improve = functools.partial(_improved, problem)
    plan = best_plan(problem, every, "alpa", clock, improve)
    # A look may hide more of what it sends than the answer of the least sum. A plan that is kept makes no offers.
    offered = min(offers, key=lambda plan: plan.step_time, default=None)
    plan = faster_by(plan, offered, problem.policy.schedules.least_gain)
    if not plan.content.memory_bound or len(unlimited) < len(looked):
        return plan
    search = msgspec.structs.replace(plan.content.search, unlimited_s=cheapest)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def _order(looked: Sequence[Looked], within: Mapping[int, LimitLooks]) -> list[int]:
    """Numbers of the meshes, those first that are likely to keep the limit, the cheapest first.

    What they take says which of the others are of use.
    """

    def key(i: int) -> tuple[bool, float, float, int]:
        look = looked[i]
        cost_s = within[i].cost_s if i in within else look.solution.objective if look.fits and look.solution else 0.0
        return not look.fits, cost_s, look.bound_s, i

    return sorted(range(len(looked)), key=key)


def _useless(unlimited: Mapping[int, float], every: Sequence[MeshSolution], known_s: float) -> Bounded | None:
    """Message that the bounds of all meshes are above a known plan; None where one is not.

    Args:
        unlimited: by mesh the bound without a limit, of those that may fit.
        every: the answers.
        known_s: seconds of the plan at hand.
    """
    cheapest = min(unlimited.values(), default=math.inf)
    if unlimited and cheapest >= known_s:
        return Bounded(_BOUND_OF_MESHES, cheapest)
    if unlimited and not any(a.solution.found and a.solution.lower_bound < known_s for a in every):
        useless = [a.solution.lower_bound for a in every if a.solution.lower_bound >= known_s]
        if any(map(math.isfinite, useless)):
            return Bounded(_BOUND_OF_MESHES, min(useless))
    return None


def _looked(problem: Problem, clock: Clock) -> Plan | Bounded:
    """The plan of what a look at each mesh finds within the memory limit; of a problem too small for one its answer.

    `Bounded` where none takes less than ``cutoff_s`` of the sub-problem, however much memory there is.

    Raises:
        InfeasiblePlanError: no look finds what fits.
    """
    answers, least_s, goal = list[MeshSolution](), math.inf, Goal(problem.policy.overlap.gap)
    # What hides behind computation is in a sum, and not in a step.
    cutoff_s, bounds_s = problem.policy.partition.near_best * problem.subproblem.cutoff_s, list[float]()
    for mesh in meshes_of(problem):
        problem.checkpoint()
        sharding_problem = sharding_problem_of(problem, mesh, clock, split_phases=False)
        if sharding_problem.broken:
            answers.append(_left_out(Looked(sharding_problem, None, math.inf)))
            continue
        with clock.phase("solve"):
            fits, look = False, None
            if problem.policy.stages.negligible_cost < math.inf:  # else nobody asks what the limit costs
                choices = replace(sharding_problem.problem, limit_bytes=None)
                look = first_look(choices, replace(goal, cutoff=cutoff_s)) or solve_mesh(problem, choices)
                bounds_s.append(look.lower_bound)
                if look.lower_bound >= cutoff_s:
                    answers.append(_left_out(Looked(sharding_problem, look, look.lower_bound)))
                    continue
                least_s, fits = min(least_s, look.objective), is_feasible(sharding_problem.problem, look.choice)
            if look is None or not fits:
                look = first_look(sharding_problem.problem, goal) or solve_mesh(problem, sharding_problem.problem)
        answers.append(MeshSolution(replace(sharding_problem, memory_bound=not fits), look))
    if bounds_s and min(bounds_s) >= cutoff_s:
        return Bounded(_BOUND_OF_MESHES, min(bounds_s))
    plan = best_plan(problem, answers, "alpa", clock)
    least_s = plan.content.search.objective if least_s == math.inf else least_s
    search = msgspec.structs.replace(plan.content.search, unlimited_s=least_s)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def _left_out(looked: Looked) -> MeshSolution:
    """Record of a mesh that is not solved: its bound is above a known plan, or nothing fits on it."""
    sharding_problem = replace(looked.sharding_problem, memory_bound=True)
    if looked.bound_s == math.inf:
        return MeshSolution(sharding_problem, Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, ""))
    return MeshSolution(sharding_problem, Solution(Status.UNKNOWN, (), math.inf, looked.bound_s, 0.0, ""), _LEFT_OUT)


def _given_up(answer: MeshSolution) -> MeshSolution:
    """Record of a mesh whose bound without a limit is above a known plan."""
    if answer.solution.status is Status.INFEASIBLE:
        return answer
    solution = replace(answer.solution, status=Status.UNKNOWN, choice=(), objective=math.inf)
    return replace(answer, solution=solution, note=_LEFT_OUT)


def _without_limit(problem: Problem, looked: Looked, clock: Clock, cutoff_s: float) -> MeshSolution:
    """The answer on one mesh without the memory limit; ``memory_bound`` where it breaks the limit, or was given up.

    Args:
        problem: what is planned.
        looked: the mesh.
        clock: takes the time.
        cutoff_s: a step of another mesh, or one that another plan takes: beyond it the mesh is given up.
    """
    sharding_problem = looked.sharding_problem
    look = looked.solution
    of = (sharding_problem.mesh, cutoff_s, None if look is None else (look.objective, look.lower_bound))

    def solved(meter: Meter) -> Solution:
        choices = replace(sharding_problem.problem, limit_bytes=None, meter=meter)
        return solve_mesh(problem, choices, known=look, cutoff_s=cutoff_s)

    with clock.phase("solve"):
        free = without_room(problem, "unlimited", of, solved)
    given_up = free.status is not Status.OPTIMAL and free.lower_bound > cutoff_s
    fits = (
        free.found and not given_up and peak_bytes(sharding_problem.problem, free.choice) <= problem.memory_limit_bytes
    )
    return MeshSolution(sharding_problem if fits else replace(sharding_problem, memory_bound=True), free)


def _under_limit(
    problem: Problem,
    free: MeshSolution,
    clock: Clock,
    best_s: float,
    known_s: float,
    offers: list[Plan],
    looks: LimitLooks | None = None,
) -> list[MeshSolution]:
    """Answers within the limit: with copies that all phases share, and with copies of each phase's own.

    The second cost no less than the first without a limit, for they are made more often; where the first within the
    limit costs next to nothing more than that, they are not tried. Separate programs have the second alone.

    Args:
        problem: what is planned.
        free: the answer without the limit.
        clock: takes the time.
        best_s: seconds of the best answer of another mesh.
        known_s: seconds of a plan that is at hand.
        offers: takes the plans of looks.
        looks: at the mesh within the limit, where there were some already.
    """
    by_phase = "memory binds, each phase gathers for itself"
    if problem.subproblem.separate_programs:
        with clock.phase("solve"):
            known = None if looks is None else looks.shared
            solution = solve_mesh(problem, free.sharding_problem.problem, known=known, binds=True, cutoff_s=known_s)
        return [MeshSolution(replace(free.sharding_problem, memory_bound=True), solution, by_phase)]
    shared, least = free.sharding_problem, free.solution.lower_bound
    negligible_s = least + problem.policy.stages.negligible_cost * abs(least)
    if looks is None:
        looks = look_within_limit(problem, shared, clock, least_s=least, best_s=best_s, known_s=known_s)
        offers += [p for of, look in looks.forms(shared) for p in _offered(problem, of, look)]
    # Which of the two forms is the cheaper looks say: the other is mostly given up by its bound.
    look, split, split_look = looks.shared, looks.split, looks.split_look
    cutoff_s = min(best_s, known_s, math.inf if split_look is None else split_look.objective)
    with clock.phase("solve"):
        solution = solve_mesh(problem, shared.problem, known=look, binds=True, cutoff_s=cutoff_s)
    answers = [MeshSolution(shared, solution, "memory binds")]
    if solution.objective <= negligible_s:
        return answers
    split = split or sharding_problem_of(problem, shared.mesh, clock, split_phases=True)
    cutoff_s = min(known_s, looks.times_joined * min(best_s, solution.objective))
    with clock.phase("solve"):
        solution = solve_mesh(problem, split.problem, known=split_look, binds=True, cutoff_s=cutoff_s)
    return [*answers, MeshSolution(split, solution, by_phase)]


def _first_offered(problem: Problem, looked: Sequence[Looked]) -> list[Plan]:
    """The plan of the look of the least bound among those that keep the limit, as `_offered` has it."""
    first = min((look for look in looked if look.fits), key=lambda look: look.bound_s, default=None)
    return [] if first is None else _offered(problem, first.sharding_problem, first.solution)


def _offered(problem: Problem, sharding_problem: ShardingProblem, look: Solution | None) -> list[Plan]:
    """The plan of a look that keeps the limit, which is offered, where the mesh takes longer to solve than a plan to
    assemble; of a part of a step none."""
    least_columns = problem.policy.meshes.offered_columns
    if problem.anytime is None or isinstance(problem.anytime, OfParts):
        return []
    if look is None or not look.found or look.status is Status.OPTIMAL:
        return []
    if sharding_problem.problem.columns < least_columns or not is_feasible(sharding_problem.problem, look.choice):
        return []
    plan = best_plan(problem, [MeshSolution(sharding_problem, look)], "alpa", Clock())
    problem.offer(plan)
    return [plan]


def _improved(problem: Problem, choices: ChoiceProblem, start: tuple[int, ...]) -> Solution:
    """A choice that is at least as cheap as ``start``: no proof is needed, and of large problems a look is enough."""
    goal = Goal(problem.policy.overlap.gap)
    free = first_look(replace(choices, limit_bytes=None), goal, start or None) if choices.columns > LARGE else None
    if free is None:
        return solve_mesh(problem, choices, binds=True)
    return free if is_feasible(choices, free.choice) else first_look(choices, goal, start or None) or free


def best_plan(
    problem: Problem,
    answers: Sequence[MeshSolution],
    name: str,
    clock: Clock,
    improve: Callable[[ChoiceProblem, tuple[int, ...]], Solution] | None = None,
) -> Plan:
    """The plan of the answer of the shortest step.

    Args:
        problem: what is planned.
        answers: on meshes.
        name: of the strategy.
        clock: takes the time.
        improve: solves the problem of the best mesh again with what computation hides; None leaves it.

    Raises:
        InfeasiblePlanError: none of them has a choice.
    """
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
        taken = Hidden(first.solution, sharding)
        if improve is not None:
            taken = hide(problem, first.sharding_problem, taken, improve)
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
    plan = assemble(problem, first.sharding_problem, sharding, search, clock)
    return replace(plan, details=details_of(problem, first.sharding_problem, taken.solution.choice, sharding))


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
