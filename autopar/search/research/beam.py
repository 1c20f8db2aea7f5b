"""Beam search in the order of the operators (Lowerre, 1976; Adams et al., SIGGRAPH'19 for schedules of programs)."""

from __future__ import annotations

import numpy as np

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method
from autopar.search.research.space import Choices, Space
from autopar.solver.problem import Array


def beam(problem: Problem) -> Plan:
    """Beam search in operator order (Lowerre, 1976; as Adams et al., SIGGRAPH'19, search schedules).

    Nodes are decided one after the other, inputs right before their first reader. The beam keeps the partial choices
    with the least cost so far, to which the least that their open pairs can cost is added; its width is what the steps
    allow. With a memory limit those are dropped that exceed it even if all open nodes hold their least.

    Args:
        problem: what is planned; `Solving.steps` decides the answer, where partial choices count like whole ones;
            ``time_limit_s`` is a cap.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "beam", search)


def search(run: MethodRun) -> None:
    """Spends the steps of ``run``."""
    space = run.space
    width = max(1, run.steps // max(1, int(space.sizes.sum())))
    states: Choices = np.zeros((1, space.sizes.size), dtype=np.int64)
    scores, held = np.zeros(1), least_held(space)[None, :]
    placed = np.zeros(space.sizes.size, dtype=bool)
    for v in operator_order(space):
        size = int(space.sizes[v])
        if not run.more(len(states) * size):
            break
        total = scores[:, None] + _added(space, v, states, placed)
        keep = np.argsort(total, axis=None, kind="stable")
        if space.usages:
            after = _held_after(space, v, held)
            fits = after.max(axis=2, initial=0.0) <= space.limit_bytes
            keep = keep[fits.ravel()[keep]]
        keep = keep[:width]
        if not keep.size:
            return
        states = states[keep // size]
        states[:, v] = keep % size
        scores = total.ravel()[keep]
        if space.usages:
            held = after.reshape(-1, held.shape[1])[keep]
        placed[v] = True
    if placed.all():
        final = space.scores(states)
        run.offer(states[int(final.argmin())], float(final.min()))


def operator_order(space: Space) -> list[int]:
    """Nodes in order, but for those without a neighbour before them, which come right before their first neighbour."""
    order: dict[int, None] = {}
    before = [sorted(u for u, _ in around if u < v) for v, around in enumerate(space.around)]
    for v, earlier in enumerate(before):
        if earlier:
            order.update(dict.fromkeys(earlier))
            order[v] = None
    order.update(dict.fromkeys(range(len(before))))
    return list(order)


def _added(space: Space, v: int, states: Choices, placed: np.ndarray) -> Array:
    """Term that each strategy of ``v`` adds to the score of each state [states, strategies]."""
    total = np.repeat(space.node_costs[v][None, :], len(states), axis=0)
    for u, rows in space.around[v]:
        if placed[u]:
            # The least over v's strategies was in the score since u was placed.
            total += (rows - rows.min(axis=1, keepdims=True))[states[:, u]]
        else:
            total += rows.min(axis=0)[None, :]
    return total


def least_held(space: Space) -> Array:
    """Bytes at every time if each node held the least that it can."""
    held = np.zeros(space.num_times)
    for u, start, stop in zip(space.usages, space.starts, space.stops, strict=True):
        held[start:stop] += u.bytes.min()
    return held


def _held_after(space: Space, v: int, held: Array) -> Array:
    """Bytes at every time with each strategy of ``v`` [states, strategies, times]."""
    after = np.repeat(held[:, None, :], int(space.sizes[v]), axis=1)
    for start, stop, nbytes in space.usages_of[v]:
        after[:, :, start:stop] += (nbytes - nbytes.min())[None, :, None]
    return after
