"""`ChoiceProblem`: choose one strategy for each node, under a limit on what is used at every time.

This is the form of Alpa (OSDI'22, section 4.2, with edge costs) and of the ASPLOS/EuroSys 2025 contest:

    minimize    sum_v cost[v][s_v] + sum_(u,v) cost[u,v][s_u][s_v]
    subject to  sum over v live at time t of usage[v][s_v] <= limit     for every time t

Costs are in any unit (autopar uses seconds); ``inf`` forbids. Usages are bytes a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import AutoparError
from autopar.solver.meter import Meter

Array = NDArray[np.float64]


class ProblemError(AutoparError):
    """A `ChoiceProblem` is not well formed."""


@dataclass(frozen=True, eq=False)
class Node:
    """A thing to choose for.

    Args:
        name: unique; shown in messages.
        costs: cost of each strategy; at least one; inf forbids.

    Raises:
        ProblemError: where ``costs`` is empty, not one row, or holds nan or -inf.
    """

    name: str
    costs: Array

    def __post_init__(self) -> None:
        costs = np.asarray(self.costs, dtype=np.float64)
        object.__setattr__(self, "costs", costs)
        if costs.ndim != 1 or costs.size == 0:
            raise ProblemError(f"node {self.name!r} has costs of shape {costs.shape}; one entry a strategy is needed")
        _check_costs(costs, f"node {self.name!r}")


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost of two choices together: ``costs[i, j]`` for strategy i of node ``source``, j of ``target``.

    Several edges between the same two nodes add up; ``source != target``.

    Raises:
        ProblemError: where ``costs`` is not a matrix, holds nan or -inf, or the two nodes are the same.
    """

    source: int
    target: int
    costs: Array

    def __post_init__(self) -> None:
        costs = np.asarray(self.costs, dtype=np.float64)
        object.__setattr__(self, "costs", costs)
        if self.source == self.target:
            raise ProblemError(f"an edge joins node {self.source} to itself", remedy="add its costs to the node")
        if costs.ndim != 2:
            raise ProblemError(f"edge {self.source}-{self.target} has costs of shape {costs.shape}, not a matrix")
        _check_costs(costs, f"edge {self.source}-{self.target}")

    @cached_property
    def finite(self) -> bool:
        """Whether no pair is forbidden."""
        return math.isfinite(self.costs.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class Usage:
    """Memory that a node's choice holds during a half-open interval of time ``[start, stop)``.

    A node may have several of them (a value, its gathered copy). ``bytes`` has one entry a strategy.

    Raises:
        ProblemError: where the interval ends before it starts or an entry is negative or not finite.
    """

    node: int
    start: int
    stop: int
    bytes: Array

    def __post_init__(self) -> None:
        used = np.asarray(self.bytes, dtype=np.float64)
        object.__setattr__(self, "bytes", used)
        if self.stop < self.start:
            raise ProblemError(f"a usage of node {self.node} stops at {self.stop}, before its start {self.start}")
        if used.ndim != 1 or not np.isfinite(used).all() or (used < 0).any():
            raise ProblemError(f"a usage of node {self.node} has bytes {used}; finite, none negative, are needed")


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """Nodes, edges, usages and the limit in bytes (None: no limit); ``meter`` counts what solving it takes.

    Raises:
        ProblemError: where names repeat, an index names no node, a shape differs from the number of strategies
            of its node, or the limit is nan.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = field(default=())
    limit_bytes: float | None = None
    meter: Meter = field(default_factory=Meter, repr=False)

    def __post_init__(self) -> None:
        sizes = [node.costs.size for node in self.nodes]
        if len({node.name for node in self.nodes}) != len(sizes):
            names = sorted(node.name for node in self.nodes)
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            raise ProblemError(f"two nodes are named {twice!r}")
        for edge in self.edges:
            ends = (edge.source, edge.target)
            if not all(0 <= end < len(sizes) for end in ends):
                raise ProblemError(f"edge {edge.source}-{edge.target} leaves the {len(sizes)} nodes")
            if edge.costs.shape != tuple(sizes[end] for end in ends):
                names = [self.nodes[end].name for end in ends]
                wanted = tuple(sizes[end] for end in ends)
                raise ProblemError(f"edge {names[0]!r}-{names[1]!r} is {edge.costs.shape}; its nodes need {wanted}")
        for usage in self.usages:
            if not 0 <= usage.node < len(sizes):
                raise ProblemError(f"a usage names node {usage.node} of {len(sizes)}")
            if usage.bytes.size != sizes[usage.node]:
                name = self.nodes[usage.node].name
                raise ProblemError(f"a usage of {name!r} has {usage.bytes.size} entries for {sizes[usage.node]}")
        if self.limit_bytes is not None and math.isnan(self.limit_bytes):
            raise ProblemError("the memory limit is nan")

    @cached_property
    def columns(self) -> int:
        """Columns of the integer program: strategies, and their pairs on edges."""
        return sum(node.costs.size for node in self.nodes) + sum(edge.costs.size for edge in self.edges)

    @property
    def parts(self) -> int:
        """Number of nodes and edges."""
        return len(self.nodes) + len(self.edges)

    @property
    def combinations(self) -> int:
        """Number of choices, allowed or not."""
        return math.prod(node.costs.size for node in self.nodes)


def with_allowed(choices: ChoiceProblem, allowed: Mapping[int, ArrayLike]) -> ChoiceProblem:
    """A choice problem some strategies of which are ruled out.

    Args:
        choices: the problem.
        allowed: by node, for each of its strategies whether it may be taken.
    """
    nodes = list(choices.nodes)
    for n, ok in allowed.items():
        nodes[n] = Node(nodes[n].name, np.where(ok, nodes[n].costs, np.inf))
    return replace(choices, nodes=tuple(nodes))


def _check_costs(costs: Array, where: str) -> None:
    # The smallest is nan where any is nan, so one pass finds both nan and -inf.
    least = costs.min(initial=math.inf)
    if not least > -math.inf:
        raise ProblemError(f"{where} has a cost of {least}", remedy="costs are finite numbers, or inf to forbid")
