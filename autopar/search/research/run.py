"""`MethodRun`: one search of one mesh, with its budget; `by_method` makes a strategy of what spends it.

`Space` is the choice problem as flat tables, which score many choices at once; `Walk` scores changes of a node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.search.clock import Clock
from autopar.search.intra import ShardingProblem
from autopar.search.mesh_search import MeshSearch, MeshSolution
from autopar.search.problem import Problem, Progress
from autopar.solver import ChoiceProblem, Solution, Status, is_feasible, least_memory, objective, peak_bytes
from autopar.solver.evaluate import FIT_TOLERANCE
from autopar.solver.problem import Array

Choices = NDArray[np.int64]


class Space:
    """Tables of a `ChoiceProblem`.

    What is forbidden, and what breaks the memory limit, costs `penalty` more: more than any allowed choice costs. So
    every choice has a finite score, and one with a score below `penalty` is allowed.

    Args:
        problem: what is searched.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        self.problem = problem
        self.sizes: Choices = np.array([n.costs.size for n in problem.nodes], dtype=np.int64)
        most = [_most(n.costs) for n in problem.nodes] + [_most(e.costs) for e in problem.edges]
        self.penalty = 2.0 * sum(most) or 1.0
        self.node_costs = tuple(self._finite(n.costs) for n in problem.nodes)
        self.edge_costs = tuple(self._finite(e.costs) for e in problem.edges)
        self._nodes, self._node_at = _flat(self.node_costs)
        self._edges, self._edge_at = _flat(self.edge_costs)
        self._source = np.array([e.source for e in problem.edges], dtype=np.int64)
        self._target = np.array([e.target for e in problem.edges], dtype=np.int64)
        self._columns = np.array([e.costs.shape[1] for e in problem.edges], dtype=np.int64)
        self.usages = tuple(u for u in problem.usages if u.stop > u.start) if problem.limit_bytes is not None else ()
        self._held, self._held_at = _flat(tuple(u.bytes for u in self.usages))
        self._user = np.array([u.node for u in self.usages], dtype=np.int64)
        times = np.unique(np.array([t for u in self.usages for t in (u.start, u.stop)], dtype=np.int64))
        self.num_times = int(times.size)
        self.starts = np.searchsorted(times, np.array([u.start for u in self.usages], dtype=np.int64))
        self.stops = np.searchsorted(times, np.array([u.stop for u in self.usages], dtype=np.int64))

    def _finite(self, costs: Array) -> Array:
        return np.where(np.isinf(costs), self.penalty, costs)

    @property
    def limit_bytes(self) -> float:
        """Bytes that a choice may hold at any time, with room for rounding; inf without a limit."""
        limit = self.problem.limit_bytes
        return np.inf if limit is None else limit + abs(limit) * FIT_TOLERANCE

    @cached_property
    def around(self) -> tuple[tuple[tuple[int, Array], ...], ...]:
        """Neighbours of each node, with the costs of the pair: a row for each strategy of the neighbour."""
        neighbours: list[list[tuple[int, Array]]] = [[] for _ in self.problem.nodes]
        for e, costs in zip(self.problem.edges, self.edge_costs, strict=True):
            neighbours[e.source].append((e.target, np.ascontiguousarray(costs.T)))
            neighbours[e.target].append((e.source, costs))
        return tuple(tuple(f) for f in neighbours)

    @cached_property
    def usages_of(self) -> tuple[tuple[tuple[int, int, Array], ...], ...]:
        """Usage of each node: (first time, time after the last, bytes by strategy), in numbers of times."""
        usages: list[list[tuple[int, int, Array]]] = [[] for _ in self.problem.nodes]
        for u, start, stop in zip(self.usages, self.starts, self.stops, strict=True):
            usages[u.node].append((int(start), int(stop), u.bytes))
        return tuple(tuple(f) for f in usages)

    def scores(self, choices: Choices) -> Array:
        """Cost of each row of ``choices`` [choices, nodes], with the penalties of what is not allowed."""
        cost = self._nodes[self._node_at + choices].sum(axis=1)
        if self._source.size:
            at = self._edge_at + choices[:, self._source] * self._columns + choices[:, self._target]
            cost = cost + self._edges[at].sum(axis=1)
        if self.usages:
            over = self.peaks(choices) / max(self.limit_bytes, 1.0) - 1.0
            cost = cost + np.where(over > 0, self.penalty * (1.0 + over), 0.0)
        return np.asarray(cost)

    def peaks(self, choices: Choices) -> Array:
        """Most bytes that each row of ``choices`` holds at any time."""
        peaks: Array = self.profiles(choices).max(axis=1, initial=0.0)
        return peaks

    def profiles(self, choices: Choices) -> Array:
        """Bytes of each row of ``choices`` at every time [choices, times]."""
        held = self._held[self._held_at + choices[:, self._user]]
        change = np.zeros((self.num_times + 1, len(choices)))
        np.add.at(change, self.starts, held.T)
        np.subtract.at(change, self.stops, held.T)
        return np.cumsum(change, axis=0)[:-1].T

    def greedy(self) -> tuple[int, ...]:
        """Each node in order takes what is cheapest with those before it."""
        choice: list[int] = []
        for v, node_costs in enumerate(self.node_costs):
            costs = node_costs + sum((rows[choice[u]] for u, rows in self.around[v] if u < v), np.zeros(1))
            choice.append(int(np.argmin(costs)))
        return tuple(choice)


class Walk:
    """A choice that changes one node at a time, each change priced by that node's own tables (delta evaluation).

    Args:
        space: what is searched.
        choice: where to begin; it obeys the memory limit.
    """

    def __init__(self, space: Space, choice: Sequence[int]) -> None:
        self.space = space
        self.choice = list(choice)
        rows: Choices = np.array([self.choice], dtype=np.int64)
        self.score = float(space.scores(rows)[0])
        self._profile = space.profiles(rows)[0] if space.usages else np.zeros(0)

    def deltas(self, node: int) -> Array:
        """Change of the score with each strategy of ``node``, memory left out."""
        costs = self.space.node_costs[node].copy()
        for other, rows in self.space.around[node]:
            costs += rows[self.choice[other]]
        return np.asarray(costs - costs[self.choice[node]])

    def fits(self, node: int, strategy: int) -> bool:
        """Whether memory holds with that strategy of ``node``."""
        held = self.space.usages_of[node]
        if not held:
            return True
        first, last = min(h[0] for h in held), max(h[1] for h in held)
        changed = self._profile[first:last].copy()
        for start, stop, nbytes in held:
            changed[start - first : stop - first] += nbytes[strategy] - nbytes[self.choice[node]]
        return float(changed.max()) <= self.space.limit_bytes

    def move(self, node: int, strategy: int, delta: float) -> None:
        """Takes that strategy; ``delta`` is from `deltas`."""
        for start, stop, nbytes in self.space.usages_of[node]:
            self._profile[start:stop] += nbytes[strategy] - nbytes[self.choice[node]]
        self.choice[node] = strategy
        self.score += delta


def _most(costs: Array) -> float:
    return float(np.max(costs, initial=0.0, where=np.isfinite(costs)))


def _flat(tables: Sequence[Array]) -> tuple[Array, Choices]:
    """All tables one after the other, and where each begins."""
    ends = np.cumsum([0, *(t.size for t in tables)])
    joined = np.concatenate([t.ravel() for t in tables]) if tables else np.zeros(0)
    return joined, ends[:-1].astype(np.int64)


@dataclass
class MethodRun:
    """Inputs of a search method as beam search: the space, steps to spend, random numbers, and a place for its results.

    The same steps and seed find the same choice. The wall clock is a cap only: where it strikes first, `capped` is set
    and the answer may differ from run to run.

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


@dataclass(frozen=True)
class MethodStrategy:
    """The strategy of a method, described as the method is; arguments as of `by_method`."""

    name: str
    method: Method
    steps: int = 20_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.method.__doc__)

    def __call__(self, problem: Problem) -> Plan:
        """The plan; see `by_method`."""
        return by_method(problem, self.name, self.method, self.steps)


@dataclass
class _MeshSearches:
    """The searches of all meshes, one after the other."""

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
        """The best choice for ``searched``: the choice problem of ``sharding_problem``, with or without its limit."""
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
