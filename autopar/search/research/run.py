"""`MethodRun`: one search of one mesh, with its budget; `by_method` makes a strategy of what spends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem
from autopar.search.mesh_search import MeshSearch, MeshSolution
from autopar.search.problem import Problem
from autopar.search.progress import Progress
from autopar.search.research.space import Space
from autopar.solver import ChoiceProblem, Solution, Status, is_feasible, least_memory, objective, peak_bytes


@dataclass
class MethodRun:
    """Inputs of a method: the space, steps to spend, random numbers, and a place for its results.

    The same steps and seed find the same choice. The wall clock is a cap only: where it strikes first, `capped` is
    set and the answer may differ from run to run.

    Args:
        space: what is searched.
        steps: choices that may be evaluated.
        start: an allowed choice to begin from.
        rng: random numbers, from the seed.
        tell: called with every better choice, its cost and the number of steps until then.
        deadline: of `time.monotonic`.
        best: the best choice that was offered.
        cost: its cost.
        bound: a cost that no choice is below, where the method proves one.
        spent: steps that were taken.
        capped: whether the clock ended the search.
    """

    space: Space
    steps: int
    start: tuple[int, ...]
    rng: np.random.Generator
    tell: Callable[[tuple[int, ...], float, int], None]
    deadline: float = math.inf
    best: tuple[int, ...] = ()
    cost: float = math.inf
    bound: float = -math.inf
    spent: int = 0
    capped: bool = False

    def more(self, count: int = 1) -> bool:
        """Takes ``count`` steps from the budget; False where they are spent or the time is over."""
        self.capped = self.capped or time.monotonic() > self.deadline
        if self.capped or self.spent + count > self.steps:
            return False
        self.spent += count
        return True

    def offer(self, choice: Sequence[int], score: float) -> None:
        """Keeps ``choice`` if it is allowed and its score (of `Space.scores` or `Walk`) is the best so far."""
        if score < self.cost and score < self.space.penalty:
            self.best, self.cost = tuple(int(k) for k in choice), score
            self.tell(self.best, score, self.spent)


#: Spends the steps of a run.
Method: TypeAlias = Callable[[MethodRun], None]


def by_method(problem: Problem, name: str, method: Method, steps: int = 20_000) -> Plan:
    """The cheapest plan that ``method`` finds, over all logical meshes.

    As in `autopar.search.alpa`, memory is first left out, and only where the answer needs more than there is the
    problem is searched with the limit, with copies that all phases share and with copies of each phase's own. Each
    of these searches has the whole budget: ``solving.steps`` or else ``steps``, and at most ``solving.time_limit_s``.

    Args:
        problem: what is planned.
        name: name of the strategy.
        method: spends the steps of a run.
        steps: choices to evaluate where `Solving` has no number.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    search = _MeshSearches(problem, name, method, problem.solving.steps or steps)
    for mesh in problem.cluster.logical_meshes(problem.job.mesh_shape):
        search.on_mesh(mesh)
    return MeshSearch(problem, search.clock).plan(search.answers, name)


@dataclass
class _MeshSearches:
    """The searches of all meshes, one behind the other."""

    problem: Problem
    name: str
    method: Method
    steps: int
    clock: Clock = field(default_factory=Clock)
    answers: list[MeshSolution] = field(default_factory=list)
    best: float = math.inf
    spent: int = 0
    began: float = field(default_factory=time.monotonic)

    def on_mesh(self, mesh: LogicalMesh) -> None:
        """Adds the answers on a mesh."""
        meshes = MeshSearch(self.problem, self.clock)
        sharding_problem = meshes.program(mesh)
        free = self._run(sharding_problem, replace(sharding_problem.problem, limit_bytes=None))
        choice = free.solution.choice
        if choice and peak_bytes(sharding_problem.problem, choice) <= self.problem.memory_limit_bytes:
            self.answers.append(free)
            return
        split = meshes.program(mesh, split_phases=True)
        for s, note in ((sharding_problem, "memory binds"), (split, "memory binds, each phase gathers for itself")):
            answer = self._run(replace(s, memory_bound=True), s.problem)
            self.answers.append(replace(answer, note=note))

    def _run(self, sharding_problem: ShardingProblem, searched: ChoiceProblem) -> MeshSolution:
        """The best choice for ``searched``: the problem of ``stated``, or that without its limit."""
        solving = self.problem.solving
        began = time.monotonic()
        with self.clock.phase("solve"):
            space = Space(searched)
            start = allowed_choice(space, solving.time_limit_s, solving.seed)
            if not start:
                return MeshSolution(
                    sharding_problem, Solution(Status.INFEASIBLE, (), math.inf, math.inf, 0.0, self.name)
                )
            limit = solving.time_limit_s
            run = MethodRun(
                space,
                self.steps,
                start,
                np.random.default_rng(solving.seed),
                lambda choice, cost, steps: self._tell(sharding_problem, choice, cost, steps),
                math.inf if limit is None else began + limit,
            )
            self.method(run)
            self.spent += run.spent
            choice = run.best or start
            cost = objective(searched, choice)
        if not is_feasible(searched, choice):
            raise AutoparError(f"{self.name} offered a choice that {searched.limit_bytes} bytes do not allow")
        optimal = run.bound >= cost * (1 - 1e-12)
        bound = cost if optimal else run.bound
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        if run.capped:
            mesh = sharding_problem.mesh
            note = f"{mesh}: the time limit came after {run.spent} of {run.steps} choices; runs may differ"
            sharding_problem = replace(sharding_problem, notes=(*sharding_problem.notes, note))
        return MeshSolution(
            sharding_problem, Solution(status, choice, cost, bound, time.monotonic() - began, self.name)
        )

    def _tell(self, sharding_problem: ShardingProblem, choice: tuple[int, ...], cost: float, steps: int) -> None:
        tell = self.problem.reporting.progress
        if tell is None or cost >= self.best:
            return
        if peak_bytes(sharding_problem.problem, choice) <= self.problem.memory_limit_bytes:
            self.best = cost
            tell(Progress(self.name, time.monotonic() - self.began, cost, self.spent + steps))


def allowed_choice(space: Space, time_limit_s: float | None, seed: int) -> tuple[int, ...]:
    """A choice to begin from: greedy if that is allowed, else that of the least memory; () where none fits."""
    choice = space.greedy()
    if is_feasible(space.problem, choice):
        return choice
    choice = least_memory(space.problem, time_limit_s=time_limit_s, seed=seed)[1]
    return choice if is_feasible(space.problem, choice) else ()
