"""The cheapest choice of a `ChoiceProblem`, by solvers that are not autopar's.

Without a limit choices are minimized away one at a time. With one, scipy is given a statement of its own:

    minimize    sum of costs[v][i] x[v, i] + sum of costs[e][i, j] y[e, i, j]
    subject to  sum_i x[v, i] = 1,  sum_j y[e, i, j] = x[source, i],  sum_i y[e, i, j] = x[target, j]
                sum over usages live at t of bytes[i] x[v, i] <= limit    for every time t,  x binary

Nothing is taken out before, and every time is a row: slow, and with no more in common with `autopar.solver` than the
numbers that it is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from autopar.solver import ChoiceProblem


def cheapest(problem: ChoiceProblem, limit_bytes: float | None = None) -> tuple[int, ...] | None:
    """The strategy of each node; None where nothing keeps the limit."""
    free = _free(problem)
    if limit_bytes is None or peak_bytes(problem, free) <= limit_bytes:
        return free
    return _within(problem, limit_bytes)


def cost_of(problem: ChoiceProblem, choice: Sequence[int]) -> float:
    """Seconds of a choice."""
    nodes = (float(n.costs[choice[v]]) for v, n in enumerate(problem.nodes))
    return math.fsum((*nodes, *(float(e.costs[choice[e.source], choice[e.target]]) for e in problem.edges)))


def _free(problem: ChoiceProblem) -> tuple[int, ...]:
    """The cheapest choice without a limit: the node with the smallest table is minimized away next."""
    tables = [((v,), n.costs) for v, n in enumerate(problem.nodes)]
    tables += [((e.source, e.target), e.costs) for e in problem.edges]
    sizes = [len(n.costs) for n in problem.nodes]
    left = set(range(len(sizes)))
    steps: list[tuple[int, list[int], np.ndarray]] = []
    while left:
        around = {v: sorted({u for names, _ in tables if v in names for u in names} - {v}) for v in left}
        v = min(left, key=lambda v: (math.prod(sizes[u] for u in around[v]) * sizes[v], v))
        scope = [*around[v], v]
        total = np.zeros([sizes[u] for u in scope])
        for names, costs in (t for t in tables if v in t[0]):
            order = sorted(range(len(names)), key=lambda i: scope.index(names[i]))
            total = total + costs.transpose(order).reshape([sizes[u] if u in names else 1 for u in scope])
        tables = [t for t in tables if v not in t[0]]
        if around[v]:
            tables.append((tuple(around[v]), total.min(axis=-1)))
        steps.append((v, around[v], total.argmin(axis=-1)))
        left.discard(v)
    choice = [0] * len(sizes)
    for v, others, best in reversed(steps):
        choice[v] = int(best[tuple(choice[u] for u in others)])
    return tuple(choice)


def _within(problem: ChoiceProblem, limit_bytes: float) -> tuple[int, ...] | None:
    """The cheapest choice within a limit; None where there is none."""
    sizes = [len(n.costs) for n in problem.nodes]
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    costs = [*(n.costs for n in problem.nodes), *(e.costs.ravel() for e in problem.edges)]
    flat = np.concatenate([np.asarray(c, float) for c in costs]) if costs else np.zeros(0)
    rows: list[tuple[list[int], list[float], float, float]] = [
        (list(range(firsts[v], firsts[v + 1])), [1.0] * n, 1.0, 1.0) for v, n in enumerate(sizes)
    ]
    at = int(firsts[-1])
    for e in problem.edges:
        cells = at + np.arange(e.costs.size).reshape(e.costs.shape)
        at += e.costs.size
        for i, row in enumerate(cells):
            rows.append(([*row, firsts[e.source] + i], [1.0] * len(row) + [-1.0], 0.0, 0.0))
        for j, column in enumerate(cells.T):
            rows.append(([*column, firsts[e.target] + j], [1.0] * len(column) + [-1.0], 0.0, 0.0))
    for held in _held(problem, firsts):
        # In units of the limit: a solver is exact to 1e-6 of what it is given.
        rows.append(([*held], [b / limit_bytes for b in held.values()], -np.inf, 1.0))
    allowed = np.isfinite(flat)
    scale = float(np.abs(flat[allowed]).max(initial=0.0)) or 1.0
    lengths = [len(r[0]) for r in rows]
    matrix = csr_matrix(
        (
            list(itertools.chain.from_iterable(r[1] for r in rows)),
            (np.repeat(np.arange(len(rows)), lengths), list(itertools.chain.from_iterable(r[0] for r in rows))),
        ),
        shape=(len(rows), len(flat)),
    )
    found = milp(
        np.where(allowed, flat, 0.0) / scale,
        integrality=(np.arange(len(flat)) < firsts[-1]).astype(int),
        bounds=Bounds(0.0, allowed.astype(float)),
        constraints=LinearConstraint(matrix, [r[2] for r in rows], [r[3] for r in rows]),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return None
    assert found.status == 0, found.message
    return tuple(int(np.argmax(found.x[firsts[v] : firsts[v + 1]])) for v in range(len(sizes)))


def _held(problem: ChoiceProblem, firsts: np.ndarray) -> list[dict[int, float]]:
    """For every time bytes by unknown."""
    found = []
    for t in sorted({u.start for u in problem.usages}):
        row: dict[int, float] = {}
        for u in problem.usages:
            if u.start <= t < u.stop:
                for i, b in enumerate(u.bytes):
                    row[int(firsts[u.node]) + i] = row.get(int(firsts[u.node]) + i, 0.0) + float(b)
        found.append(row)
    return found


def peak_bytes(problem: ChoiceProblem, choice: Sequence[int]) -> float:
    """Bytes of a choice at the fullest time."""
    times = {u.start for u in problem.usages}
    used = (sum(float(u.bytes[choice[u.node]]) for u in problem.usages if u.start <= t < u.stop) for t in times)
    return max(used, default=0.0)
