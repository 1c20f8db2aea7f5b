"""Random choice problems, and brute force in plain Python."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from autopar.solver import ChoiceProblem, Edge, Node, Usage


def random_problem(seed: int, most_nodes: int = 8) -> ChoiceProblem:
    """Up to ``most_nodes`` nodes of 1 to 4 strategies; whole or real costs, some inf, most with a limit."""
    r = np.random.default_rng(seed)
    n = int(r.integers(1, most_nodes + 1))
    sizes = [int(r.integers(1, 5 if n < 9 else 3)) for _ in range(n)]
    whole, unit, forbid = r.random() < 0.5, 10.0 ** r.integers(-7, 3), r.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        drawn = r.integers(-1, 6, shape).astype(float) if whole else r.random(shape) * unit
        return np.where(r.random(shape) < 0.1, math.inf, drawn) if forbid else drawn

    nodes = tuple(Node(f"n{i}", costs(k)) for i, k in enumerate(sizes))
    ends = [tuple(int(v) for v in r.integers(0, n, 2)) for _ in range(int(r.integers(0, 2 * n + 1)))]
    edges = tuple(Edge(a, b, costs(sizes[a], sizes[b])) for a, b in ends if a != b)
    usages = []
    for _ in range(int(r.integers(0, 2 * n + 1))):
        v, start = int(r.integers(0, n)), int(r.integers(0, 8))
        usages.append(Usage(v, start, start + int(r.integers(0, 6)), r.integers(0, 10, sizes[v]).astype(float)))
    limit = None if r.random() < 0.2 else float(r.integers(0, 6 * n + 2))
    return ChoiceProblem(nodes, edges, tuple(usages), limit)


def choices(problem: ChoiceProblem) -> itertools.product[tuple[int, ...]]:
    """Every choice, in lexicographic order."""
    return itertools.product(*(range(node.costs.size) for node in problem.nodes))


def plain_cost(problem: ChoiceProblem, choice: tuple[int, ...]) -> float:
    """The objective, term by term."""
    total = sum(node.costs[k] for node, k in zip(problem.nodes, choice, strict=True))
    return float(total + sum(e.costs[choice[e.source], choice[e.target]] for e in problem.edges))


def plain_peak(problem: ChoiceProblem, choice: tuple[int, ...]) -> float:
    """The peak, time by time."""
    times = {u.start for u in problem.usages}
    return max(
        (sum(float(u.bytes[choice[u.node]]) for u in problem.usages if u.start <= t < u.stop) for t in times),
        default=0.0,
    )


def ladder(rungs: int, strategies: int, *, seed: int = 0, skip: int = 0) -> ChoiceProblem:
    """A residual net's shape: forward chain, mirrored backward chain, rungs between, a parameter on each rung.

    Costs between nodes are those of moving between 6 layouts; ``skip`` > 0 adds edges over so many rungs, end to end.
    """
    r = np.random.default_rng(seed)
    count = 3 * rungs
    made, wanted = r.integers(0, 6, (count, strategies)), r.integers(0, 6, (count, strategies))
    nodes = [Node(f"n{i}", r.random(strategies) * 1e-3) for i in range(count)]
    edges: list[Edge] = []
    usages: list[Usage] = []

    def join(u: int, v: int) -> None:
        table = r.random((6, 6)) * 1e-3
        np.fill_diagonal(table, 0.0)
        edges.append(Edge(u, v, table[np.ix_(made[u], wanted[v])]))

    def hold(v: int, start: int, stop: int, size: float) -> None:
        usages.append(Usage(v, start, stop, np.round(size / 2.0 ** r.integers(0, 4, strategies))))

    for i in range(rungs):
        forward, backward, parameter = i, rungs + i, 2 * rungs + i
        for step in (1, skip):
            if step and i % step == 0 and i + step < rungs:
                join(forward, forward + step)
                join(backward + step, backward)
        join(forward, backward)
        join(parameter, forward)
        join(parameter, backward)
        hold(forward, i, 2 * rungs - i, 1e6 * (1 + r.random()))
        hold(backward, 2 * rungs - 1 - i, 2 * rungs - i + 1, 1e6)
        hold(parameter, 0, 2 * rungs + 2, 4e6 * r.random())
    return ChoiceProblem(tuple(nodes), tuple(edges), tuple(usages))


def with_limit(problem: ChoiceProblem, limit_bytes: float | None) -> ChoiceProblem:
    """The same problem under another limit."""
    return replace(problem, limit_bytes=limit_bytes)


def dense_problem(seed: int) -> ChoiceProblem:
    """5 to 7 nodes, nearly all joined, of 3 to 5 strategies: presolve leaves them, and the relaxation has gaps."""
    r = np.random.default_rng(seed)
    n = int(r.integers(5, 8))
    sizes = r.integers(3, 6, n)
    forbid, whole = r.random() < 0.4, r.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        drawn = r.integers(0, 9, shape).astype(float) if whole else r.random(shape)
        return np.where(r.random(shape) < 0.15, math.inf, drawn) if forbid else drawn

    nodes = tuple(Node(f"n{i}", costs(k) * 0.5) for i, k in enumerate(sizes))
    edges = tuple(
        Edge(i, j, costs(sizes[i], sizes[j])) for i in range(n) for j in range(i) if r.random() < 0.8
    )  # fmt: skip
    return ChoiceProblem(nodes, edges)


def with_usages(problem: ChoiceProblem, seed: int, part: float) -> ChoiceProblem:
    """Each node holds memory for some time; the limit is ``part`` of the way from the least to the most peak."""
    r = np.random.default_rng(seed)
    usages = []
    for v, node in enumerate(problem.nodes):
        start = int(r.integers(0, 6))
        usages.append(Usage(v, start, start + int(r.integers(1, 6)), r.integers(0, 20, node.costs.size).astype(float)))
    peaks = [
        max(sum(float(take(u.bytes)) for u in usages if u.start <= t < u.stop) for t in range(12))
        for take in (min, max)
    ]
    return replace(problem, usages=tuple(usages), limit_bytes=peaks[0] + part * (peaks[1] - peaks[0]))


def grid(width: int, length: int, strategies: int, *, coupling: float = 1.0, seed: int = 0) -> ChoiceProblem:
    """Chains side by side with rungs between neighbours: ``width`` nodes must be known to cut it.

    Costs between nodes are those of moving between layouts on a line, times ``coupling``, as in a program of equal
    layers: strategy k of any node has layout k modulo 6. The relaxation is then nearly tight.
    """
    r = np.random.default_rng(seed)
    count = width * length
    layout = np.arange(strategies) % 6
    nodes = tuple(Node(f"n{i}", r.random(strategies) * 1e-3) for i in range(count))
    edges, usages = [], []
    for v in range(count):
        for u in (v + 1 if (v + 1) % width else count, v + width):
            if u < count:
                size = coupling * 1e-3 * (0.5 + r.random())
                edges.append(Edge(v, u, size * np.abs(layout[:, None] - layout[None, :])))
        row = v // width
        usages.append(Usage(v, row, row + length // 2, np.round(1e6 / 2.0 ** r.integers(0, 4, strategies))))
    return ChoiceProblem(nodes, tuple(edges), tuple(usages))
