"""Rounds of `walk` from the best choice so far, on two threads, with changing prices and noise."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autopar.solver.lagrange.compiled import COMPILED
from autopar.solver.lagrange.kernels import cost_of, held_by, priced
from autopar.solver.lagrange.packed import Ints, Packed
from autopar.solver.lagrange.peaks import make_peaks
from autopar.solver.lagrange.trees import Draws, State, walk
from autopar.solver.problem import Array

_THREADS = 2
_MOVES = 2000 if COMPILED else 50  # in a round
_NODES = 30  # of a tree at most
_WEIGHTS = (1.0, 0.9, 0.5, 1.0, 1.1, 0.0, 0.7)  # of the dual's prices, in turn
_NOISE = 0.02  # of the cost a node, at first
_TOGETHER = 10  # rounds after which all threads go on from the best choice
_DRAWS = 1 << 16


def improve(
    packed: Packed, prices: Array, start: Ints, deadline: float, rounds: int, seed: int, bound: float
) -> tuple[float, Ints]:
    """The cheapest choice found that obeys the limit, and its cost (inf where there is none).

    Args:
        packed: the problem.
        prices: multipliers by row.
        start: a choice; it need not obey the limit.
        deadline: of `time.monotonic`.
        rounds: at most.
        seed: of random numbers.
        bound: cost at which to stop.
    """
    levels = {w: priced(packed.memory, packed.graph.first, packed.costs, w * prices) for w in sorted(set(_WEIGHTS))}
    states = [_state(packed, start) for _ in range(_THREADS)]
    best, cost = start, _allowed_cost(packed, start)
    began = time.monotonic()

    def run(thread: int, turn: int, part: float) -> None:
        random = np.random.default_rng((seed, thread, turn))
        draws = Draws(random.random(_DRAWS), random.exponential(size=_DRAWS), np.zeros(1, dtype=np.int64))
        weight = _WEIGHTS[(turn + 3 * thread) % len(_WEIGHTS)]
        level = abs(states[thread].figures[0]) / max(packed.graph.first.size - 1, 1)
        noise = _NOISE * level * (1.0 - part) ** 2 if (turn + thread) % 3 else 0.0
        walk(packed.graph, packed.memory, packed.costs, levels[weight], states[thread], draws, _MOVES, _NODES, noise)

    with ThreadPoolExecutor(_THREADS) as threads:
        for turn in range(rounds):
            now = time.monotonic()
            if now > deadline or cost <= bound:
                break
            part = (now - began) / (deadline - began) if math.isfinite(deadline) else turn / rounds
            list(threads.map(run, range(_THREADS), [turn] * _THREADS, [min(part, 1.0)] * _THREADS))
            for state in states:
                if state.figures[1] < cost:
                    best, cost = state.best.copy(), float(state.figures[1])
            if turn % _TOGETHER == _TOGETHER - 1 and cost < math.inf:
                states = [_state(packed, best) for _ in range(_THREADS)]
    return _allowed_cost(packed, best), best


def _state(packed: Packed, choice: Ints) -> State:
    largest, added = make_peaks(held_by(packed.memory, choice))
    figures = np.array([cost_of(packed.graph, packed.costs, choice), _allowed_cost(packed, choice), 0.0, 0.0])
    return State(choice.copy(), largest, added, choice.copy(), figures)


def _allowed_cost(packed: Packed, choice: Ints) -> float:
    """Its cost; inf where it exceeds the limit or takes what is forbidden."""
    cost = float(cost_of(packed.graph, packed.costs, choice))
    fits = held_by(packed.memory, choice).max(initial=0.0) <= packed.memory.limit
    return cost if fits and cost < packed.forbidden else math.inf
