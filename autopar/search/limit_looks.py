"""Looks within the memory limit, at all meshes that break it without one, before any of these is solved.

Solving a mesh within the limit takes seconds, and a look a part of one: looks say which mesh is solved first, and the
bounds of the others then exceed what is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.search.intra import ShardingProblem, extract
from autopar.search.looks import Looked
from autopar.search.mesh_search import MeshSearch
from autopar.search.problem import Problem
from autopar.solver import Solution, first_look
from autopar.solver.goal import Goal


@dataclass(frozen=True)
class LimitLooks:
    """Looks at one mesh within the memory limit.

    Args:
        shared: with copies that all phases share; None where a proof takes as long.
        split: the problem with copies of each phase's own; None where it is not of use.
        split_look: the look at it.
        times_joined: times the seconds with copies that are one joined that the look at it is priced at, 1 or more: an
            estimate by which it is compared with answers of other meshes. inf where there is no look.
    """

    shared: Solution | None
    split: ShardingProblem | None = None
    split_look: Solution | None = None
    times_joined: float = math.inf

    def forms(self, shared: ShardingProblem) -> tuple[tuple[ShardingProblem, Solution | None], ...]:
        """Problems of the mesh, of which ``shared`` has copies that all phases share, with the looks at them."""
        split = () if self.split is None else ((self.split, self.split_look),)
        return ((shared, self.shared), *split)

    @property
    def cost_s(self) -> float:
        """Seconds of the cheaper choice; inf where none is found."""
        return min((look.objective for look in (self.shared, self.split_look) if look and look.found), default=math.inf)

    @property
    def bound_s(self) -> float:
        """No choice within the limit costs less, as copies are priced; -inf where that is not known."""
        if self.shared is None or (self.split is not None and self.split_look is None):
            return -math.inf
        return min(self.shared.lower_bound, math.inf if self.split_look is None else self.split_look.lower_bound)

    def is_useless(self, best_s: float, known_s: float) -> bool:
        """Whether neither form takes less than the best answer of another mesh, nor than a plan that is at hand."""
        if self.shared is None or self.shared.lower_bound <= min(best_s, known_s):
            return False
        if self.split is None:
            return True
        most_s = min(known_s, self.times_joined * best_s)
        return self.split_look is not None and self.split_look.lower_bound > most_s


def look_within_limit(
    meshes: MeshSearch, shared: ShardingProblem, *, least_s: float, best_s: float, known_s: float
) -> LimitLooks:
    """Looks at a mesh within the limit.

    Args:
        meshes: what is planned.
        shared: the problem of the mesh.
        least_s: no choice without the limit costs less: copies of each phase's own are looked at where the limit costs
            something.
        best_s: seconds of the best answer of another mesh.
        known_s: seconds of a plan that is at hand.
    """
    problem, effort = meshes.problem, meshes.problem.policy.effort
    look = meshes.within(shared, least_s, min(best_s, known_s))
    negligible_s = least_s + effort.gap * abs(least_s)
    if look is None or look.objective <= negligible_s or problem.subproblem.separate_programs:
        return LimitLooks(look)
    split = meshes.program(shared.mesh, split_phases=True)
    with meshes.clock.phase("solve"):
        split_look = first_look(split.problem, Goal(effort.sharding_gap, known_s))
    return LimitLooks(look, split, split_look, _times_joined(problem, split, split_look))


def _times_joined(problem: Problem, split: ShardingProblem, look: Solution | None) -> float:
    if look is None or not look.found:
        return math.inf
    sharding = extract(problem, split, look.choice)
    seconds = sharding.compute_s + sharding.communication_s + sharding.host_s + sharding.starts_s
    return max(1.0, look.objective / seconds) if seconds > 0 else 1.0


def looks_within_limit(
    meshes: MeshSearch,
    looked: Sequence[Looked],
    known_s: float,
    offer: Callable[[ShardingProblem, Solution | None], None],
) -> dict[int, LimitLooks]:
    """Looks within the limit, by number of the mesh; none where no two meshes need one.

    Args:
        meshes: what is planned.
        looked: looks at them without a limit.
        known_s: seconds of a plan that is at hand.
        offer: takes each choice that is the cheapest so far.
    """
    best_s = min((look.solution.objective for look in looked if look.fits and look.solution), default=math.inf)
    most_s = min(best_s, known_s)
    short = [
        i for i, look in enumerate(looked) if not look.fits and math.isfinite(look.bound_s) and look.bound_s <= most_s
    ]
    looks: dict[int, LimitLooks] = {}
    for i in sorted(short, key=lambda i: (looked[i].bound_s, i)) if len(short) > 1 else ():
        if looked[i].bound_s > best_s:
            continue
        meshes.problem.checkpoint()
        shared = replace(looked[i].sharding_problem, memory_bound=True)
        looks[i] = look_within_limit(meshes, shared, least_s=looked[i].bound_s, best_s=best_s, known_s=known_s)
        if looks[i].cost_s < best_s:
            best_s = looks[i].cost_s
            for of, look in looks[i].forms(shared):
                offer(of, look)
    return looks
