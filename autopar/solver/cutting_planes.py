"""The best multipliers under what is known of the dual so far: Kelley's cutting planes.

Every choice s bounds the dual function of `multipliers` from above by a plane,

    L(y) <= cost(s) + sum_t y_t (use_t(s) - limit)          for all y >= 0

so the largest value that all planes known so far allow is an upper bound of max L, and where it lies is the next y to
try (Kelley, J. SIAM 8, 1960). Only rows that some choice broke get a multiplier. A box around y keeps the program
bounded while no combination of choices fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.evaluate import within
from autopar.solver.integer_program import IntegerProgram, Row
from autopar.solver.problem import Array
from autopar.solver.pulp_highs import run_highs

_ROWS_A_PLANE = 6


@dataclass(eq=False)
class Planes:
    """The planes.

    Args:
        limit: bytes, more than 0.
        scale: a typical cost; multipliers are in units of scale / limit inside the program.
        box: largest multiplier in those units.
        costs: cost of each choice.
        used: bytes of each choice, by row.
        rows: those that have a multiplier, increasing.
    """

    limit: float
    scale: float
    box: float
    costs: list[float] = field(default_factory=list)
    used: list[Array] = field(default_factory=list)
    rows: tuple[int, ...] = ()

    def add(self, cost: float, used: Array) -> None:
        """A choice's plane; the highest peaks at which it breaks the limit become rows."""
        self.costs.append(cost)
        self.used.append(used)
        over = [t for t in range(used.size) if not within(float(used[t]), self.limit)]
        peaks = [
            t for t in over
            if (t == 0 or used[t] > used[t - 1]) and (t + 1 == used.size or used[t] >= used[t + 1])
        ]  # fmt: skip
        peaks.sort(key=lambda t: (-used[t], t))
        self.rows = tuple(sorted({*self.rows, *peaks[:_ROWS_A_PLANE]}))

    def highest(self, floor: float) -> tuple[float, Array] | None:
        """The largest value that all planes allow, at least ``floor`` (a known bound), and its y by row.

        Returns None where HiGHS finds none.
        """
        rows = []
        for cost, used in zip(self.costs, self.used, strict=True):
            slopes = 1.0 - used[list(self.rows)] / self.limit
            values = np.concatenate([[1.0], slopes])
            some = np.flatnonzero(values)
            rows.append(Row(some, values[some], -math.inf, max(0.0, cost - floor) / self.scale))
        count = len(self.rows)
        costs, upper = np.zeros(count + 1), np.full(count + 1, self.box)
        costs[0], upper[0] = -1.0, math.inf
        first = np.zeros(1, dtype=np.int64)
        program = IntegerProgram(costs, upper, 0, tuple(rows), first, (), 0.0, 1.0)
        answer = run_highs(program, time_limit_s=None, start=None, seed=0, gap=0.0)
        if answer.values is None:
            return None
        y = np.zeros(self.used[0].size)
        y[list(self.rows)] = np.maximum(answer.values[1:], 0.0) * self.scale / self.limit
        return floor + float(answer.values[0]) * self.scale, y

    def at_the_box(self, y: Array) -> bool:
        """Whether some multiplier is as large as the box lets it be."""
        return bool((y * self.limit / self.scale >= self.box * (1 - 1e-6)).any())
