"""Exact reductions of a choice problem, and the way back.

Each leaves the least cost as it is (PBQP reductions: Scholz and Eckstein, LCTES'02; Hames and Scholz, JMLC'06;
dominance is the dead-end elimination of Goldstein, Biophys. J. 66, 1994):

=====================  ==============================================================  ====================
reduction              what                                                            function
=====================  ==============================================================  ====================
parallel edges         C_uv + C'_uv                                                    `Workspace.of`
forbidden strategies   c_k = inf, or C_vu[k, :] all inf                                `_drop_forbidden`
folded edges           C_uv[i, j] = a_i + b_j goes into c_u and c_v                    `_fold_edges`
one strategy           C_vu[0, :] goes into c_u                                        `_fold_edges`
degree 0               min c_v is certain                                              `_eliminate`
degree 1 (RI)          c_u[i] += min_k (C_uv[i, k] + c_v[k])                           `_eliminate`
degree 2 (RII)         C_uw[i, j] += min_k (C_uv[i, k] + c_v[k] + C_vw[k, j])          `_eliminate`
dominated strategies   k goes if c_k - c_l + sum_u min_j (C_vu[k,j] - C_vu[l,j]) >= 0  `_drop_dominated`
                       and l uses no more memory than k in any row
=====================  ==============================================================  ====================

Nodes that use memory in a row are never eliminated: their choice is what the row weighs. So rows are
named by the caller (`reduce_problem`'s ``times``), who starts with few of them (see `memory`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from autopar.solver.evaluate import maximal_times, within
from autopar.solver.meter import Work
from autopar.solver.plain import is_worth_loading
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.workspace import NOISE, Removed, Workspace, fold_constants

_MANY = 500  # nodes from which on compiled loops pay
_ROUNDS = 20  # dominance is tried again this often on what changed; in practice two or three do


@dataclass(frozen=True, eq=False)
class Reduction:
    """A smaller problem with the same least cost, less ``offset``.

    Args:
        problem: what is left; None where there is no choice at all.
        offset: cost to add to that of a choice for ``problem``.
        kept: original number of each node of ``problem``.
        labels: for each of them the original number of each strategy.
        removed: nodes taken out, in order.
        size: number of nodes of the original.
    """

    problem: ChoiceProblem | None
    offset: float
    kept: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    removed: tuple[Removed, ...]
    size: int

    def lift(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice for the original problem that belongs to ``choice`` for the reduced one."""
        lifted = [-1] * self.size
        for v, labels, k in zip(self.kept, self.labels, choice, strict=True):
            lifted[v] = labels[k]
        for step in reversed(self.removed):
            lifted[step.node] = step.strategy(lifted)
        return tuple(lifted)

    def project(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """``choice`` for the original problem as one for the reduced; None where a strategy was dropped."""
        projected = []
        for v, labels in zip(self.kept, self.labels, strict=True):
            if choice[v] not in labels:
                return None
            projected.append(labels.index(choice[v]))
        return tuple(projected)


def reduce_problem(problem: ChoiceProblem, times: Sequence[int] | None = None) -> Reduction:
    """All reductions, until none applies.

    Args:
        problem: what to reduce.
        times: times at which the memory limit is imposed; None means everywhere. Memory at other times is
            left out of the reduced problem: its optimum is then a lower bound.
    """
    if times is None:
        times = () if problem.limit_bytes is None else maximal_times(problem.usages)
    problem.meter.add(Work.REDUCED, problem.parts)
    space = Workspace.of(problem, sorted(set(times)) if problem.limit_bytes is not None else ())
    space.infeasible = not within(0.0, problem.limit_bytes)
    if len(problem.nodes) >= _MANY and is_worth_loading(len(problem.nodes), problem.columns):
        space.compiled = import_module("autopar.solver.compiled")  # loads numba
    _run(space)
    if space.infeasible:
        return Reduction(None, 0.0, (), (), (), len(problem.nodes))
    kept, left = space.problem(problem)
    labels = tuple(tuple(int(k) for k in space.labels[v]) for v in kept)
    return Reduction(left, space.offset, kept, labels, tuple(space.removed), len(problem.nodes))


def _run(space: Workspace) -> None:
    dirty = set(range(len(space.costs)))
    if not _drop_forbidden(space, dirty):
        return
    dirty_before = set(dirty)  # nodes whose edges or costs changed since dominance last looked
    for _ in range(_ROUNDS):
        dirty_before |= _shrink(space, dirty)
        dirty = set()
        for v in sorted(dirty_before):
            if not space.infeasible and space.alive[v] and space.costs[v].size > 1 and _drop_dominated(space, v):
                dirty |= {v, *space.edges[v]}
        dirty_before = set(dirty)
        if not dirty or space.infeasible:
            return
    _shrink(space, dirty)


def _shrink(space: Workspace, dirty: set[int]) -> set[int]:
    """Folding and elimination by degree from the ``dirty`` nodes on; returns all nodes that changed."""
    touched = set(dirty)
    _fold_edges(space, sorted(dirty), touched)
    heap = [(len(space.edges[v]), v) for v in touched if space.alive[v] and not space.usages[v]]
    heapq.heapify(heap)
    while heap and not space.infeasible:
        degree, v = heapq.heappop(heap)
        if not space.alive[v] or degree != len(space.edges[v]):
            continue
        if degree > 2:
            break
        changed = set(space.edges[v])
        _eliminate(space, v)
        if not _drop_forbidden(space, changed):
            break
        _fold_edges(space, sorted(changed), changed)
        touched |= changed
        for u in sorted(changed):
            if space.alive[u] and not space.usages[u]:
                heapq.heappush(heap, (len(space.edges[u]), u))
    return {v for v in touched if space.alive[v]}


def _drop_forbidden(space: Workspace, changed: set[int]) -> bool:
    """Drop strategies that cost inf with every strategy of some neighbour; adds to ``changed`` what it touches.

    Returns whether every node has a strategy left.
    """
    queue = sorted(changed)
    while queue and not space.infeasible:
        v = queue.pop()
        if not space.doubt[v] and v not in space.unsure:
            continue
        space.unsure.discard(v)
        good = np.isfinite(space.costs[v])
        for u in space.doubt[v]:
            good &= np.isfinite(space.edges[v][u].min(axis=1))
        if not good.all():
            space.drop(v, good)
            changed |= {v, *space.edges[v]}
            queue.extend(sorted(space.edges[v]))
    return not space.infeasible


def _fold_edges(space: Workspace, nodes: Sequence[int], changed: set[int]) -> None:
    """Fold edges that are a row term plus a column term, as all are that end in a node of one strategy."""
    for v in nodes:
        for u in sorted(space.fresh[v]):
            space.fresh[v].discard(u)
            space.fresh[u].discard(v)
            costs = space.edges[v][u]
            if space.compiled is None:
                terms = fold_constants(costs)
            else:
                terms = None if space.compiled.is_no_sum(costs, NOISE) else (costs[:, 0], costs[0] - costs[0, 0])
            if terms is not None:
                space.costs[v] = space.costs[v] + terms[0]
                space.costs[u] = space.costs[u] + terms[1]
                space.disconnect(u, v)
                changed |= {u, v}


def _eliminate(space: Workspace, v: int) -> None:
    """Take out a node of degree 0, 1 or 2."""
    node_costs = space.costs[v]
    around = sorted(space.edges[v])
    if not around:
        space.offset += float(node_costs.min())
    elif len(around) == 1:
        (u,) = around
        space.costs[u] = space.costs[u] + (space.edges[u][v] + node_costs).min(axis=1)
        if u in space.doubt[v]:
            space.unsure.add(u)
    else:
        u, w = around
        product = least_sum if space.compiled is None else space.compiled.least_products
        joint = product(space.edges[u][v] + node_costs, space.edges[v][w])
        known = space.edges[u].get(w)
        total = joint if known is None else known + joint
    space.take_out(v)
    if len(around) == 2:
        space.connect(u, w, total)


def least_sum(left: Array, right: Array) -> Array:
    """The min-plus product: ``out[i, j] = min_k (left[i, k] + right[k, j])``."""
    return np.asarray((left[:, None, :] + np.ascontiguousarray(right.T)[None, :, :]).min(axis=2))


def _drop_dominated(space: Workspace, v: int) -> bool:
    """Drop strategies of ``v`` for which another is never worse; of equal ones the first stays."""
    node_costs = space.costs[v]
    worse = node_costs[:, None] - node_costs[None, :]  # [k, l]: a bound below on what k costs more than l
    for u, costs in space.edges[v].items():
        # inf - inf: both forbid, so this neighbour's strategy says nothing; all of them cannot be so.
        if space.compiled is not None:
            space.compiled.least_differences(costs, worse)
        elif u in space.doubt[v]:
            with np.errstate(invalid="ignore"):
                worse += np.fmin.reduce(costs[:, None, :] - costs[None, :, :], axis=2)
        else:
            worse += np.minimum.reduce(costs[:, None, :] - costs[None, :, :], axis=2)
    never_better = worse >= 0
    for _, _, used in space.usages[v]:
        never_better &= used[:, None] >= used[None, :]
    np.fill_diagonal(never_better, False)
    if not never_better.any():
        return False
    keep = np.ones(node_costs.size, dtype=np.bool_)
    # From the last on, and only by strategies still there: of equal ones the first is left.
    for k in np.flatnonzero(never_better.any(axis=1))[::-1]:
        keep[k] = not (never_better[k] & keep).any()
    if keep.all():
        return False
    space.drop(v, keep)
    return True
