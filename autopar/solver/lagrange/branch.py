"""Branch and bound over what nodes take of the memory, each part bounded by its own multipliers and messages.

Where few large values share little room the dual mixes choices that no single choice can, and its bound stays far
below the optimum: on an instance of 342 nodes by 20%. There a run of rows whose bytes vary most between the decoded
choices, times their price, is split at its average: less here, more there. Each part begins from its parent's prices
and messages, so that few steps bound it, and what its limit forbids goes first (`room`). The part with the lower bound
is gone into; of the others the one with the least bound is next (Land and Doig, Econometrica 28, 1960, with Lagrangian
bounds: Geoffrion, Math. Prog. Study 2, 1974). Where no bytes vary, the node whose decoded strategy varies most is split
into that strategy and the others.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.solver.lagrange.dual import Dual
from autopar.solver.lagrange.kernels import decode, priced
from autopar.solver.lagrange.packed import Ints, Packed
from autopar.solver.lagrange.room import keep_what_fits
from autopar.solver.lagrange.search import Search
from autopar.solver.problem import Array

Marks = NDArray[np.bool_]

_STEPS = 25  # of a part's ascent
_FIRST_STEPS = 6  # after which parts are ordered
_LENGTH = 0.5  # of the first steps of a part, of Polyak's
_MOVES = 400  # trees by which a choice is improved
_ROOT_TRIES = 40  # with other random numbers; the best of these is cheaper than many more trees of one
_PATIENCE = 60  # parts without a cheaper choice after which only one in _SELDOM is improved
_SELDOM = 5
_ROUNDING = 1e-12
_MOST_BYTES = 1 << 28  # of messages that open parts keep


@dataclass(frozen=True, order=True)
class _Part:
    """A part of the choices: those of allowed strategies.

    Args:
        bound: no choice in it costs less.
        number: in order of making.
        allowed: marks of strategies.
        prices, messages: to begin from.
    """

    bound: float
    number: int
    allowed: Marks = field(compare=False)
    prices: Array = field(compare=False)
    messages: Array = field(compare=False)


@dataclass(eq=False)
class Branching:
    """The search; `run` makes it.

    Args:
        packed: the problem.
        search: improves choices by trees.
        root: the ascent of the whole problem.
        gain: least improvement that counts: nearly 1 where all costs are whole.
        seed: of random numbers.
        cost: of ``choice``; inf where there is none.
        choice: the cheapest that fits, or None.
        bound: no choice costs less.
        parts: that were bounded.
    """

    packed: Packed
    search: Search
    root: Dual
    gain: float
    seed: int
    cost: float = field(init=False)
    choice: Ints | None = field(init=False)
    bound: float = field(init=False)
    parts: int = 0
    _made: int = 0
    _polished: int = 0
    _gained: int = 0  # parts when trees last found a cheaper choice
    _left: float = math.inf  # least bound of the parts that cannot be split

    def __post_init__(self) -> None:
        self.cost, self.choice, self.bound = self.root.cost, self.root.choice, self.root.bound

    def run(self, allowed: Marks, deadline: float, most_parts: int) -> None:
        """Bounds parts until none is open that may have a cheaper choice.

        Args:
            allowed: marks of the strategies of the whole.
            deadline: of `time.monotonic`.
            most_parts: to be bounded.
        """
        self._take(self.root)
        for _ in range(_ROOT_TRIES):
            if time.monotonic() > deadline:
                break
            self._polish_near(self.root)
        most_open = max(16, _MOST_BYTES // max(1, self.root.messages.nbytes))
        first = _Part(self.bound, 0, allowed, self.root.best_prices, self.root.messages.copy())
        open_parts: list[_Part] = []
        current: _Part | None = first
        while current is not None or open_parts:
            part = current if current is not None else heapq.heappop(open_parts)
            current = None
            if self._useless(part.bound):
                continue
            if self.parts >= most_parts or time.monotonic() > deadline or len(open_parts) > most_open:
                heapq.heappush(open_parts, part)
                break
            self.parts += 1
            below = sorted(self._split(part))
            if below:
                current = below[0]
                for other in below[1:]:
                    heapq.heappush(open_parts, other)
        open_bound = min([self._left, *(part.bound for part in open_parts)])
        self.bound = max(self.bound, min(open_bound, self.cost))

    def _useless(self, bound: float) -> bool:
        return bound >= self.cost - max(self.gain, _ROUNDING * abs(self.cost))

    def _dual(self, allowed: Marks, prices: Array, messages: Array) -> Dual:
        """An ascent of the bound over allowed strategies."""
        packed = self.packed
        dual = Dual(replace(packed, costs=np.where(allowed, packed.costs, packed.forbidden)))
        dual.begin(prices, messages, _LENGTH)
        dual.choice, dual.cost = self.choice, self.cost
        return dual

    def _take(self, dual: Dual) -> None:
        if dual.choice is not None and dual.cost < self.cost:
            self.choice, self.cost = dual.choice.copy(), dual.cost

    def _polish_near(self, dual: Dual) -> None:
        """Improves by trees what an ascent decoded, where it fits; else the choice of the whole, or the best."""
        fruitless = self.parts - self._gained
        if fruitless > _PATIENCE and self.parts % _SELDOM:
            return
        self._polished += 1
        starts = (dual.nearest, self.root.choice, self.choice)
        if starts[0] is None or math.isinf(self.search.allowed_cost(starts[0])):
            starts = (self.choice, self.root.choice, self.choice)
        begin = starts[self._polished % 3]
        if begin is None:
            return
        random = np.random.default_rng((self.seed, 7, self._polished))
        cost, better = self.search.polished(begin, dual.best_prices, _MOVES, random)
        if cost < self.cost:
            self.choice, self.cost, self._gained = better, cost, self.parts

    def _split(self, part: _Part) -> list[_Part]:
        """Bounds a part; the parts of it that are left open."""
        dual = self._dual(part.allowed, part.prices, part.messages)
        packed = self.packed
        graph, memory = packed.graph, packed.memory
        choices = []
        for _ in range(_STEPS):
            dual.step()
            self._take(dual)
            if self._useless(dual.bound):
                return []
            costs = priced(memory, graph.first, dual.packed.costs, dual.prices)
            choices.append(decode(graph, costs, dual.messages, True))
        self._polish_near(dual)
        bound = max(dual.bound, part.bound)
        sides = self._sides(part.allowed, np.array(choices), dual.best_prices)
        if sides is None:
            self._left = min(self._left, bound)
            return []
        below = []
        for allowed in sides:
            if keep_what_fits(memory, graph.first, allowed):
                inner = self._dual(allowed, dual.best_prices, dual.messages)
                for _ in range(_FIRST_STEPS):
                    inner.step()
                self._take(inner)
                self._made += 1
                part_of_side = _Part(max(inner.bound, bound), self._made, allowed, inner.best_prices, inner.messages)
                if not self._useless(part_of_side.bound):
                    below.append(part_of_side)
        return below

    def _sides(self, allowed: Marks, choices: Ints, prices: Array) -> tuple[Marks, Marks] | None:
        """Two marks of strategies that share none and leave none out; None where all choices seen are one."""
        memory, first = self.packed.memory, self.packed.graph.first
        held = memory.bytes[memory.first[:-1] + choices[:, memory.node]]
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        score = held.std(axis=0) * (sums[memory.stop] - sums[memory.start])
        for run in np.argsort(-score, kind="stable"):
            if score[run] <= 0:
                break
            v = int(memory.node[run])
            used = memory.bytes[memory.first[run] : memory.first[run + 1]]
            open_bytes = np.unique(used[allowed[first[v] : first[v + 1]]])
            if open_bytes.size > 1:
                average = float(held[:, run].mean())
                middle = average if open_bytes[0] <= average < open_bytes[-1] else open_bytes[0]
                return _halves(allowed, int(first[v]), used <= middle)
        often = (choices != choices[-1]).mean(axis=0)
        open_count = np.add.reduceat(allowed, first[:-1]) if first.size > 1 else np.zeros(0)
        often = np.where(open_count > 1, often, 0.0)
        if not often.size or often.max() <= 0:
            return None
        v = int(often.argmax())
        return _halves(allowed, int(first[v]), np.arange(first[v + 1] - first[v]) == choices[-1, v])


def _halves(allowed: Marks, at: int, here: Marks) -> tuple[Marks, Marks]:
    """``allowed`` with one node's strategies (from ``at`` on) those marked in ``here``, and those not."""
    one, other = allowed.copy(), allowed.copy()
    one[at : at + here.size] &= here
    other[at : at + here.size] &= ~here
    return one, other
