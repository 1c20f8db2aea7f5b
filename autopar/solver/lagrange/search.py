"""Search from the best choice so far on two threads: trees re-decided under changing prices and noise, and kicks.

A kick disturbs all prices and costs at random, sweeps, decodes and descends by trees: another valley of the priced
costs, which trees do not reach. Small problems take hundreds of them a second, large ones mostly the trees.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.lagrange.kernels import cost_of, decode, held_by, priced, sweep
from autopar.solver.lagrange.packed import Ints, Packed
from autopar.solver.lagrange.peaks import make_peaks
from autopar.solver.lagrange.trees import Draws, State, walk
from autopar.solver.meter import Work
from autopar.solver.problem import Array

_THREADS = 2
_MOVES = 2000  # in a round
_MOVES_A_NODE = 20
_NODES = 30  # of a tree at most
_WEIGHTS = (1.0, 0.9, 0.5, 1.0, 1.1, 0.0, 0.7)  # of the dual's prices, in turn
_NOISE = 0.02  # of the cost a node, at first
_TOGETHER = 10  # rounds after which all threads go on from the best choice
_DRAWS = 1 << 16
_FEW_DRAWS = 1 << 13
_KICKS_EACH = 3  # rounds of a thread, of which one is kicks
_KICKED_ENTRIES = 5e6  # of tables, in the kicks of a round
_MOST_KICKS = 64  # in a round
_DESCENT = (1.0, 0.5, 0.0)  # weights of prices after a kick
_FADING = 0.9  # of the longest round, in every round
_SURE_ROUNDS = 12  # of a small problem, whatever the deadline, while no choice is allowed


@dataclass(frozen=True, eq=False)
class Search:
    """Shared data of the rounds.

    Args:
        packed: the problem.
        prices: multipliers by row.
        messages: of the sweeps at them.
        seed: of random numbers.
    """

    packed: Packed
    prices: Array
    messages: Array
    seed: int
    _levels: dict[float, Array] = field(default_factory=dict)

    @property
    def _tree_entries(self) -> int:
        """Entries of tables that a move visits, about: those inside of a tree of the mean size."""
        nodes = max(1, self.packed.graph.first.size - 1)
        return 1 + self.packed.entries * min(_NODES // 2, nodes) // nodes

    def run(self, start: Ints, deadline: float, rounds: int, bound: float) -> tuple[float, Ints]:
        """The cheapest choice found that obeys the limit, and its cost (inf where there is none).

        Args:
            start: a choice; it need not obey the limit.
            deadline: of `time.monotonic`. Small problems are searched past it until some choice is allowed, for a few
                rounds: a limit shorter than the start of an interpreter should not lose their answer.
            rounds: at most.
            bound: cost at which to stop.
        """
        for weight in sorted({*_WEIGHTS, *_DESCENT}):
            self._levels[weight] = self._priced(weight * self.prices)
        states = [self._state(start) for _ in range(_THREADS)]
        best, cost = start, float(states[0].figures[1])
        began = time.monotonic()
        sure = _SURE_ROUNDS if self.packed.small else 0
        longest_s, last = 0.0, began
        with ThreadPoolExecutor(_THREADS) as threads:
            for turn in range(rounds):
                now = time.monotonic()
                longest_s, last = max(_FADING * longest_s, now - last), now
                if cost <= bound or (now + longest_s > deadline and (turn >= sure or cost < math.inf)):
                    break
                timed = math.isfinite(deadline) and deadline > began
                part = (now - began) / (deadline - began) if timed else turn / rounds
                left = 1.0 - min(part, 1.0)
                states = list(threads.map(self._round, range(_THREADS), [turn] * _THREADS, [left] * _THREADS, states))
                for state in states:
                    if state.figures[1] < cost:
                        best, cost = state.best.copy(), float(state.figures[1])
                if turn % _TOGETHER == _TOGETHER - 1 and cost < math.inf:
                    states = [self._state(best) for _ in range(_THREADS)]
        return self.allowed_cost(best), best

    def polished(self, choice: Ints, prices: Array, moves: int, random: np.random.Generator) -> tuple[float, Ints]:
        """The cheapest choice within the memory limit that tree moves reach from ``choice``, and its cost; inf if none.

        A tree move chooses all nodes of a random tree of the graph again, at costs that price memory by multipliers.

        Args:
            choice: strategy of each node; it need not obey the limit.
            prices: Lagrange multiplier of each memory row. They fall from round to round to a part of these.
            moves: tree moves of a round.
            random: source of random numbers.
        """
        packed = self.packed
        state = self._state(choice)
        draws = Draws(random.random(_FEW_DRAWS), random.exponential(size=_FEW_DRAWS), np.zeros(1, dtype=np.int64))
        packed.meter.add(Work.WALKED, len(_DESCENT) * moves * self._tree_entries)
        for weight in _DESCENT:
            at_prices = self._priced(weight * prices)
            walk(packed.graph, packed.memory, packed.costs, at_prices, state, draws, moves, _NODES, 0.0)
        return self.allowed_cost(state.best), state.best

    def _round(self, thread: int, turn: int, left: float, state: State) -> State:
        """One round of a thread, with the part of the time that is left; returns where it is then."""
        packed = self.packed
        random = np.random.default_rng((self.seed, thread, turn))
        draws = Draws(random.random(_DRAWS), random.exponential(size=_DRAWS), np.zeros(1, dtype=np.int64))
        if (turn + thread) % _KICKS_EACH == 1:
            return self._kicks(random, draws, state)
        weight = _WEIGHTS[(turn + 3 * thread) % len(_WEIGHTS)]
        noise = _NOISE * self._level(state) * left * left if (turn + thread) % 3 else 0.0
        moves = min(_MOVES, _MOVES_A_NODE * len(packed.nodes))
        packed.meter.add(Work.WALKED, moves * self._tree_entries)
        walk(packed.graph, packed.memory, packed.costs, self._levels[weight], state, draws, moves, _NODES, noise)
        return state

    def _kicks(self, random: np.random.Generator, draws: Draws, state: State) -> State:
        """``state``, or what a kick led to where that is cheaper."""
        packed = self.packed
        graph, memory = packed.graph, packed.memory
        nodes = graph.first.size - 1
        kicks = min(_MOST_KICKS, nodes, 1 + int(_KICKED_ENTRIES / max(graph.tables.size, 1)))
        for _ in range(kicks):
            factors = math.exp(random.normal(0.0, 0.5)) * np.exp(random.normal(0.0, 0.3, self.prices.size))
            noise = 10.0 ** random.uniform(-3.0, 0.0) * self._level(state)
            costs = self._priced(factors * self.prices) + noise * random.exponential(size=packed.costs.size)
            messages = self.messages.copy() if random.random() < 0.5 else np.zeros(self.messages.size)
            for _ in range(int(random.integers(1, 12))):
                sweep(graph, costs, messages, True)
                sweep(graph, costs, messages, False)
            kicked = self._state(decode(graph, costs, messages, bool(random.integers(2))))
            for weight in _DESCENT:
                moves = max(50, nodes // 4)
                walk(graph, memory, packed.costs, self._levels[weight], kicked, draws, moves, _NODES, 0.0)
            if kicked.figures[1] < state.figures[1]:
                state = kicked
        return state

    def _level(self, state: State) -> float:
        """Cost a node."""
        return abs(float(state.figures[0])) / max(self.packed.graph.first.size - 1, 1)

    def _priced(self, prices: Array) -> Array:
        return priced(self.packed.memory, self.packed.graph.first, self.packed.costs, prices)

    def _state(self, choice: Ints) -> State:
        largest, added = make_peaks(held_by(self.packed.memory, choice))
        cost = cost_of(self.packed.graph, self.packed.costs, choice)
        figures = np.array([cost, self.allowed_cost(choice), 0.0, 0.0])
        return State(choice.copy(), largest, added, choice.copy(), figures)

    def allowed_cost(self, choice: Ints) -> float:
        """Its cost; inf where it exceeds the limit or takes what is forbidden."""
        packed = self.packed
        cost = float(cost_of(packed.graph, packed.costs, choice))
        fits = held_by(packed.memory, choice).max(initial=0.0) <= packed.memory.limit
        return cost if fits and cost < packed.forbidden else math.inf
