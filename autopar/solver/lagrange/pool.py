"""Equal arrays held once, and what was computed of them kept: programs repeat few tables very often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import Array

Map = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(eq=False)
class Pool:
    """Arrays by number.

    Args:
        tables: costs of two nodes, one's strategies by the other's.
        maps: ``maps[m][k]`` is what strategy k of one node means for another.
    """

    tables: list[Array] = field(default_factory=list)
    maps: list[Map] = field(default_factory=list)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def table(self, values: Array) -> int:
        """The number of a table of equal ``values``."""
        key = (0, values.shape, values.tobytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.tables)
            self.tables.append(np.ascontiguousarray(values))
        return self._numbers[key]

    def map(self, values: Map) -> int:
        """The number of an equal map."""
        key = (1, values.size, values.tobytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.maps)
            self.maps.append(values)
        return self._numbers[key]

    def identity(self, size: int) -> int:
        """The map of ``size`` strategies to themselves."""
        return self._one(("identity", size), lambda: self.map(np.arange(size)))

    def compose(self, outer: int, inner: int) -> int:
        """The map k -> outer[inner[k]]."""
        return self._one(("compose", outer, inner), lambda: self.map(self.maps[outer][self.maps[inner]]))

    def inverse(self, number: int) -> int | None:
        """The map that undoes a map of n strategies to n; None where there is none."""

        def make() -> int | None:
            values = self.maps[number]
            turned = np.argsort(values, kind="stable")
            return self.map(turned) if (values[turned] == np.arange(values.size)).all() else None

        inverse: int | None = self._once(("inverse", number), make)
        return inverse

    def take(self, table: int, rows: int, columns: int) -> int:
        """A table seen through a map of its rows and one of its columns."""
        return self._one(
            ("take", table, rows, columns),
            lambda: self.table(self.tables[table][np.ix_(self.maps[rows], self.maps[columns])]),
        )

    def diagonal(self, table: int, rows: int, columns: int) -> Array:
        """Costs of a table whose rows and columns both follow one node."""
        costs: Array = self._once(
            ("diagonal", table, rows, columns), lambda: self.tables[table][self.maps[rows], self.maps[columns]]
        )
        return costs

    def transpose(self, table: int) -> int:
        """The table with rows and columns exchanged."""
        return self._one(("transpose", table), lambda: self.table(self.tables[table].T))

    def total(self, counts: tuple[tuple[int, int], ...]) -> int:
        """The sum of tables, each so often."""
        if counts == ((counts[0][0], 1),):
            return counts[0][0]

        def make() -> int:
            values = np.zeros(self.tables[counts[0][0]].shape)
            for number, count in counts:
                values += count * self.tables[number]
            return self.table(values)

        return self._one(("total", counts), make)

    def follows(self, table: int) -> tuple[int | None, int | None]:
        """Maps of what is left no choice: column -> the only row that it allows, row -> the only column, or None."""

        def make() -> tuple[int | None, int | None]:
            finite = np.isfinite(self.tables[table])
            rows = self.map(finite.argmax(axis=0)) if (finite.sum(axis=0) == 1).all() else None
            columns = self.map(finite.argmax(axis=1)) if (finite.sum(axis=1) == 1).all() else None
            return rows, columns

        maps: tuple[int | None, int | None] = self._once(("follows", table), make)
        return maps

    def free(self, table: int) -> bool:
        """Whether the table forbids nothing."""
        return bool(self._once(("free", table), lambda: np.isfinite(self.tables[table]).all()))

    def allowed(self, table: int, kept: Mask, columns: bool) -> Mask:
        """Columns (or else rows) that are allowed with some of the ``kept`` strategies of the other side."""

        def make() -> Mask:
            finite = np.isfinite(self.tables[table])
            return np.asarray((finite if columns else finite.T)[kept].any(axis=0))

        mask: Mask = self._once(("allowed", table, kept.tobytes(), columns), make)
        return mask

    def separated(self, table: int) -> tuple[Array, Array] | None:
        """Row and column terms that add up to the table; None where there are none."""

        def make() -> tuple[Array, Array] | None:
            values = self.tables[table]
            if not np.isfinite(values).all():
                return None
            if 1 in values.shape:  # no rounding may keep such an edge
                return (values[:, 0], np.zeros(1)) if values.shape[1] == 1 else (np.zeros(1), values[0])
            rows, columns = values[:, 0], values[0] - values[0, 0]
            if (rows[:, None] + columns != values).any():
                return None
            return rows, columns

        terms: tuple[Array, Array] | None = self._once(("separated", table), make)
        return terms

    def _one(self, key: tuple[Any, ...], make: Callable[[], int]) -> int:
        return int(self._once(key, make))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]
