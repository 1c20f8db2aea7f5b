"""Lower bounds of wide problems by messages: sequential tree-reweighted message passing (TRW-S).

Kolmogorov, "Convergent tree-reweighted message passing", PAMI 28 (2006), and "A new look at reweighted message
passing", PAMI 37 (2015). It climbs the dual of the linear relaxation over the local polytope, which for programs is
nearly always as high as the optimum. With a message M_uv (over v's strategies) along each edge in each direction, the
cost of every choice is the same after

    t_v[k] = c_v[k] + sum_u M_uv[k]            r_uv[i, j] = C_uv[i, j] - M_uv[j] - M_vu[i]

Nodes are visited in order, then in reverse order. A visit of v, with
g = 1 / max(edges to later nodes, edges to earlier ones, 1), does

    d_v = min t_v;  t_v -= d_v                 M_vu[j] <- min_k (g t_v[k] - M_uv[k] + C_vu[k, j]) - d_vu

for the edges ahead, where d_vu makes the least entry 0. Everything that is left is then at least 0, so the sum of all d
is a lower bound; d_vu counts from the visit of u on, and d_uv of the sweep before until then. At the visit of v the
sum without d_v, plus t_v[k], bounds every choice that takes strategy k of v: a lower bound of the min-marginal, which
`elimination` has exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from autopar.solver.meter import Meter, Work
from autopar.solver.plain import is_worth_loading
from autopar.solver.problem import Array, ChoiceProblem
from autopar.solver.sweeping import Flat, Sweep, plain_sweep
from autopar.solver.workspace import Workspace

_ROUNDING = 1e-12  # of the sum of what was added up: a generous part of all roundings


@dataclass(eq=False)
class Messages:
    """The state of the ascent on one graph; its edges never change, its node costs and strategies may.

    Args:
        costs: cost of each node's strategies; finite.
        tables: ``tables[v]`` has for each neighbour its number, the slots of the messages to and from it, and the
            edge (own strategies by the neighbour's; each row and column has a finite entry).
        slots: the messages; slot of that from u to v.
        taken: d_uv of each message, by slot; those of forward messages are even.
        gains: d_v of each node.
        marginals: no choice that takes the strategy costs less (-inf before a second sweep).
        excess: how much more each strategy cost than the node's best at its latest visit.
        ahead: share of a node's cost that each message takes.
        size: sum of the magnitudes in the bound, for the rounding.
        sweeps: made so far.
        since: sweeps at the time when node costs last changed.
        meter: counts sweeps.
    """

    costs: list[Array]
    tables: list[list[tuple[int, int, int, Array]]]
    slots: list[Array]
    taken: list[float]
    gains: list[float]
    marginals: list[Array]
    excess: list[Array]
    ahead: list[float]
    size: float = 0.0
    sweeps: int = 0
    since: int = 0
    meter: Meter = field(default_factory=Meter)
    _flat: Flat | None = None

    @staticmethod
    def of(problem: ChoiceProblem) -> Messages:
        """No messages yet; ``problem`` is reduced (`presolve`), its usages and limit do not matter."""
        space = Workspace.of(problem, ())
        tables: list[list[tuple[int, int, int, Array]]] = [[] for _ in space.costs]
        slots: list[Array] = []
        for v, edges in enumerate(space.edges):
            for u in sorted(edges):
                if u > v:
                    to = len(slots)
                    tables[v].append((u, to, to + 1, np.ascontiguousarray(edges[u])))
                    tables[u].append((v, to + 1, to, np.ascontiguousarray(edges[u].T)))
                    slots += [np.zeros(space.costs[u].size), np.zeros(space.costs[v].size)]
        shares = []
        for v, edges in enumerate(space.edges):
            later = sum(u > v for u in edges)
            shares.append(1.0 / max(later, len(edges) - later, 1))
        lowest = [np.full(costs.size, -math.inf) for costs in space.costs]
        return Messages(
            list(space.costs),
            tables,
            slots,
            [0.0] * len(slots),
            [0.0] * len(space.costs),
            lowest,
            list(space.costs),
            shares,
            meter=problem.meter,
        )

    @property
    def bound(self) -> float:
        """No choice costs less; -inf before a sweep."""
        return self._sum() - self.rounding if self.sweeps > self.since else -math.inf

    @property
    def rounding(self) -> float:
        """Bound of the rounding error in `bound`."""
        return _ROUNDING * self.size

    def reprice(self, costs: Sequence[Array]) -> None:
        """Go on with other node ``costs``, finite, of the strategies that are left."""
        self.costs = list(costs)
        self.marginals = [np.full(node_costs.size, -math.inf) for node_costs in costs]
        self.since = self.sweeps
        self._flat = None

    def _sum(self) -> float:
        """Sum of the gains of all nodes and of the messages that the last sweep sent: the bound, but for rounding."""
        return math.fsum(self.gains) + math.fsum(self.taken[1 - self.sweeps % 2 :: 2])

    def sweep(self) -> None:
        """Visit all nodes, forward at even sweeps and backward at odd ones."""
        flat = self._flat if self._flat is not None else self._flatten()
        valid = self.sweeps > self.since
        run: Sweep = plain_sweep
        if isinstance(flat.first, np.ndarray):
            run = import_module("autopar.solver.compiled").sweep  # loads numba
        self.meter.add(Work.SWEPT, flat.tables.size // 2)
        self.size = float(run(flat, self.sweeps % 2 == 0, valid, self._sum(), self.rounding))
        self.taken, self.gains = flat.taken.tolist(), flat.gains.tolist()
        self.sweeps += 1

    def _flatten(self) -> Flat:
        """The state as flat arrays, of which the lists are views from then on."""
        halves = [half for node_tables in self.tables for half in node_tables]
        slot, messages = _joined(self.slots)
        table, tables = _joined([costs.ravel() for *_, costs in halves])
        first, costs = _joined(self.costs)
        flat = Flat(
            first,
            np.concatenate([[0], np.cumsum([len(node_tables) for node_tables in self.tables])]).astype(np.int64),
            np.array([half[0] for half in halves], dtype=np.int64),
            np.array([half[1] for half in halves], dtype=np.int64),
            np.array([half[2] for half in halves], dtype=np.int64),
            table,
            slot,
            np.array(self.ahead, dtype=np.float64),
            tables,
            costs,
            messages,
            np.array(self.taken, dtype=np.float64),
            np.array(self.gains, dtype=np.float64),
            _joined(self.marginals)[1],
            _joined(self.excess)[1],
        )
        self.slots = _views(messages, slot)
        self.marginals, self.excess = _views(flat.marginals, first), _views(flat.excess, first)
        # Loops are loaded only where that pays.
        self._flat = flat if is_worth_loading(len(self.costs), tables.size // 2) else flat.listed()
        return self._flat

    def decode(self) -> tuple[int, ...]:
        """A choice: in order, each node's cheapest given the choices before it and the messages from those after it."""
        choice: list[int] = []
        for v, costs in enumerate(self.costs):
            total = costs
            for u, _, inbound, table in self.tables[v]:
                total = total + (table[:, choice[u]] if u < v else self.slots[inbound])
            choice.append(int(total.argmin()))
        return tuple(choice)

    def restrict(self, keep: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.bool_]] | None:
        """Leave each node the strategies marked in ``keep``; bounds and messages stay valid for choices of those.

        Strategies that are then forbidden with all of some neighbour's go too. Returns what is left; None, and
        nothing is done, where no choice is.
        """
        left = self._consistent(keep)
        if left is None:
            return None
        self._flat = None
        for v, marks in enumerate(left):
            self.costs[v], self.marginals[v], self.excess[v] = (
                part[marks] for part in (self.costs[v], self.marginals[v], self.excess[v])
            )
            table = []
            for u, outbound, inbound, costs in self.tables[v]:
                self.slots[inbound] = self.slots[inbound][marks]
                table.append((u, outbound, inbound, np.ascontiguousarray(costs[np.ix_(marks, left[u])])))
            self.tables[v] = table
        return left

    def _consistent(self, keep: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.bool_]] | None:
        left = [marks.copy() for marks in keep]
        queue = list(range(len(left)))
        while queue:
            v = queue.pop()
            if not left[v].any():
                return None
            for u, _, _, costs in self.tables[v]:
                allowed = np.asarray(np.isfinite(costs[left[v]]).any(axis=0))
                if not allowed[left[u]].all():
                    left[u] &= allowed
                    queue.append(u)
        return left


def _joined(parts: Sequence[Array]) -> tuple[NDArray[np.int64], Array]:
    """Start of each part in the vector of all, and the end of the last; the vector."""
    starts = np.concatenate([[0], np.cumsum([part.size for part in parts])]).astype(np.int64)
    return starts, np.concatenate([*parts, np.zeros(0)])


def _views(values: Array, starts: NDArray[np.int64]) -> list[Array]:
    return [values[begin:end] for begin, end in itertools.pairwise(starts.tolist())]
