"""Multipliers on the memory rows by subgradients, over messages that are never thrown away.

For multipliers y >= 0 and any messages, `sweep` at costs with memory priced bounds the least priced cost, so

    L(y) = sweep(c + y use) - sum_t y_t (limit - base_t)    <=    the least cost of a choice that fits

Two sweeps from the messages of the step before are nearly as good as convergence, since y moves little. The step
follows an average of the rows' excess in decoded choices (Barahona and Anbil, "The volume algorithm", Math. Prog. 87,
2000), its length is Polyak's (USSR Comp. Math. 9, 1969) with the cheapest known choice as the target, and only rows
that are peaks of the excess, or priced already, move: neighbouring rows hold nearly the same nodes. Decoded choices
that fit are answers.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.evaluate import within
from autopar.solver.lagrange.kernels import cost_of, decode, descend, held_by, priced, sweep
from autopar.solver.lagrange.packed import Ints, Packed
from autopar.solver.meter import Work
from autopar.solver.problem import Array

_AVERAGE = 0.1  # part of the newest excess in the average
_PATIENCE = 15  # steps without progress after which the length shrinks
_SHRINK = 0.7
_SHORTEST = 1e-3
_PROGRESS = 1e-4  # relative
_AMBITION = 0.5  # of the bound: so far above it is the target where no choice is known to cost less
_BLOCK = 50  # rows of which the fullest may get a price
_PRESS = 60  # doublings of all prices at most, until a decoded choice fits
_ROUNDING = 1e-11  # of the magnitudes in the bound: a generous part of all roundings


@dataclass(eq=False)
class Dual:
    """The state of the ascent.

    Args:
        packed: the problem.
        messages: of `sweep`.
        prices: now, by row.
        best_prices: those of ``bound``.
        bound: no allowed choice costs less.
        choice: the cheapest that fits and takes nothing forbidden, or None.
        cost: its cost; inf where there is none.
        nearest: of the decoded choices that with the lowest peak.
        steps: made so far.
        deadline: of `time.monotonic`, after which no further sweep begins.
    """

    packed: Packed
    deadline: float = math.inf
    messages: Array = field(init=False)
    prices: Array = field(init=False)
    best_prices: Array = field(init=False)
    bound: float = -math.inf
    choice: Ints | None = None
    cost: float = math.inf
    nearest: Ints | None = None
    steps: int = 0
    _lowest: float = math.inf
    _length: float = 1.0
    _average: Array | None = None
    _patience: int = 0
    _reached: float = -math.inf

    def __post_init__(self) -> None:
        graph, rows = self.packed.graph, self.packed.memory.base.size
        pairs = np.diff(graph.first)[graph.other] if graph.other.size else np.zeros(0, dtype=np.int64)
        self.messages = np.zeros(int(pairs.sum()))
        self.prices = np.zeros(rows)
        self.best_prices = np.zeros(rows)

    def begin(self, prices: Array, messages: Array, length: float) -> None:
        """Goes on from the prices and messages of another ascent on the same graph, with steps of such a length."""
        self.prices[:] = prices
        self.best_prices[:] = prices
        self.messages[:] = messages
        self._length = length

    def swept_bound(self, costs: Array, sweeps: int = 1) -> float:
        """Sweeps at ``costs``, forward and backward; the bound of the last."""
        bound = -math.inf
        self.packed.meter.add(Work.SWEPT, 2 * sweeps * self.packed.entries)
        for _ in range(sweeps):
            sweep(self.packed.graph, costs, self.messages, True)
            if time.monotonic() > self.deadline:
                break
            bound = sweep(self.packed.graph, costs, self.messages, False)
        return bound

    def note(self, choice: Ints) -> Array:
        """Keeps a choice that is the cheapest so far that fits; returns bytes by row."""
        packed = self.packed
        held = held_by(packed.memory, choice)
        peak = float(held.max(initial=0.0))
        if peak < self._lowest:
            self._lowest, self.nearest = peak, choice.copy()
        if within(peak, packed.memory.limit):
            cost = cost_of(packed.graph, packed.costs, choice)
            if cost < self.cost and cost < packed.forbidden:
                self.choice, self.cost = choice.copy(), cost
        return held

    def press(self, deadline: float) -> None:
        """Looks for some choice that fits: prices on the rows that are over, doubled while there are any."""
        packed = self.packed
        memory = packed.memory
        least = self.swept_bound(packed.costs, 4)
        least = 0.0 if math.isinf(least) else least
        messages = self.messages.copy()
        held = self.note(decode(packed.graph, packed.costs, self.messages, True))
        price = max(abs(least), float(np.abs(packed.costs).max(initial=0.0)), 1e-30) / max(memory.limit, 1.0) / 64
        prices = np.zeros(memory.base.size)
        for _ in range(_PRESS):
            over = held > memory.limit
            if self.choice is not None or not over.any() or time.monotonic() > deadline:
                break
            prices = np.where(over, np.maximum(2.0 * prices, price), prices)
            costs = priced(memory, packed.graph.first, packed.costs, prices)
            self.swept_bound(costs)
            choice = decode(packed.graph, costs, self.messages, True)
            descend(packed.graph, costs, choice, 3)
            held = self.note(choice)
        self.messages[:] = messages

    def step(self) -> None:
        """One bound at the prices, one choice, and the next prices."""
        packed = self.packed
        graph, memory = packed.graph, packed.memory
        costs = priced(memory, graph.first, packed.costs, self.prices)
        # No product by BLAS: its threads wait for each other, and their number changes the rounding.
        constant = float(((memory.limit - memory.base) * self.prices).sum()) if self.prices.any() else 0.0
        raw = self.swept_bound(costs)
        if math.isinf(raw):  # out of time
            return
        value = raw - constant - _ROUNDING * (abs(raw) + abs(constant))
        self.steps += 1
        self._patience += 1
        if value > self.bound:
            if not value - self._reached <= _PROGRESS * abs(value):
                self._patience, self._reached = 0, value
            self.bound, self.best_prices = value, self.prices.copy()
        if self._patience >= _PATIENCE:
            self._length = max(self._length * _SHRINK, _SHORTEST)
            self._patience, self._average = 0, None
            self.prices = self.best_prices.copy()
            costs = priced(memory, graph.first, packed.costs, self.prices)
        held = self.note(decode(graph, costs, self.messages, True))
        if not memory.base.size:
            return
        excess = held / memory.limit - 1.0 if memory.limit > 0 else held
        self._average = excess if self._average is None else (1 - _AVERAGE) * self._average + _AVERAGE * excess
        self._move(value)

    def _move(self, value: float) -> None:
        assert self._average is not None
        average, memory = self._average, self.packed.memory
        begins = np.arange(0, average.size, _BLOCK)
        fullest = np.repeat(np.maximum.reduceat(average, begins), np.diff([*begins, average.size]))
        moves = (self.prices > 0) | ((average > 0) & (average >= fullest))
        direction = np.where(moves, average, 0.0)
        norm = float((direction * direction).sum())
        if norm <= 0:
            self._average = None
            return
        target = min(self.cost, self.bound + max(_AMBITION * abs(self.bound), 1e-30))
        way = max(target - value, 1e-3 * abs(target))
        self.prices = np.maximum(0.0, self.prices + self._length * way / norm * direction / max(memory.limit, 1e-30))

    @property
    def settled(self) -> bool:
        """Whether steps have become as short as they get."""
        return self._length <= _SHORTEST


def ascend(dual: Dual, deadline: float, most_steps: int) -> None:
    """Steps until the ``deadline`` of `time.monotonic`, ``most_steps`` or the proof."""
    settled_at = math.inf
    for step in range(most_steps):
        dual.step()
        if time.monotonic() > deadline or dual.cost <= dual.bound:
            return
        if dual.settled:
            settled_at = min(settled_at, step)
            if step > 3 * settled_at + 500:
                return
