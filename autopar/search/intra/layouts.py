"""Layouts of tensors on one mesh and seconds of resharding between them, cached by shape and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Layout, TensorType
from autopar.search.intra.sharding_problem import Array
from autopar.search.resharding import path_tables
from autopar.sharding import Factor, Rule, strategies
from autopar.sharding.reshard import PathTables


@dataclass(frozen=True)
class Pairs:
    """Layouts in which an input may lie and in which it is read.

    Args:
        pairs: all of them.
        stored: the first of each.
        read: the second of each.
    """

    pairs: tuple[tuple[Layout, Layout], ...]
    stored: tuple[Layout, ...]
    read: tuple[Layout, ...]

    @staticmethod
    def of(pairs: Iterable[tuple[Layout, Layout]]) -> Pairs:
        """Some pairs."""
        kept = tuple(pairs)
        return Pairs(kept, tuple(k for k, _ in kept), tuple(c for _, c in kept))

    def and_then(self, others: Pairs) -> Pairs:
        """These and others; these themselves where there are no others."""
        return Pairs.of((*self.pairs, *others.pairs)) if others.pairs else self


@dataclass
class LayoutTable:
    """Facts about layouts for `build`: a table for each mesh and cost model; ``entries`` counts its numbers."""

    mesh: LogicalMesh
    cost: CostModel
    known: dict[tuple[TensorType, bool], tuple[Layout, ...]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, int, int, bool], Array] = field(default_factory=dict)
    numbers: dict[int, tuple[object, int]] = field(default_factory=dict)
    by_layouts: dict[tuple[Layout, ...], int] = field(default_factory=dict)
    distinct: list[tuple[tuple[Layout, ...], NDArray[np.int64]]] = field(default_factory=list)
    by_identity: dict[tuple[TensorType, int, int, float], tuple[object, object, Array]] = field(default_factory=dict)
    nearest: dict[tuple[TensorType, int, int, int, float], tuple[object, object, object, Array]] = field(
        default_factory=dict
    )
    unions: dict[tuple[int, ...], tuple[object, tuple[Layout, ...]]] = field(default_factory=dict)
    paired: dict[tuple[int, bool], tuple[object, Pairs]] = field(default_factory=dict)
    shards: dict[int, Array] = field(default_factory=dict)
    entries: int = 0
    wire: str = ""
    narrow: dict[str, LayoutTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = path_tables(self.mesh, self.cost).sending(self.wire)
        #: Tables in which what is sent costs something, and nothing else does.
        self.messages = PathTables(self.mesh, lambda *_: 1.0, local=lambda _: 0.0)

    def sending(self, wire: str) -> LayoutTable:
        """The table for values that are sent in the format ``wire``; "" is as they are."""
        if wire == self.wire:
            return self
        if wire not in self.narrow:
            self.narrow[wire] = LayoutTable(self.mesh, self.cost, wire=wire)
        return self.narrow[wire]

    def all(self, type: TensorType, partial: bool = False) -> tuple[Layout, ...]:
        """Every layout of ``type``, replicated first; with ``partial`` also those that are partial sums."""
        key = (type, partial)
        if key not in self.known:
            if type.dtype.startswith("key<") or type.size == 0:
                self.known[key] = (Layout.replicated(type.rank),)
            else:
                labels = tuple(range(type.rank))
                rule = Rule(tuple(Factor(n) for n in type.shape), (labels,), (labels,), ((0,),) if partial else ())
                offered = strategies(rule, (type,), (type,), self.mesh)
                self.known[key] = tuple(s.operand_layouts[0] for s in offered)
        return self.known[key]

    def coarser(self, layout: Layout) -> list[Layout]:
        """Layouts that gathering some axes of ``layout`` leads to, itself left out."""
        axes = sorted(layout.axes)
        layouts = []
        for bits in range(1, 2 ** len(axes)):
            gone = {a for i, a in enumerate(axes) if bits >> i & 1}
            layouts.append(Layout(tuple(tuple(a for a in dim if a not in gone) for dim in layout.dims)))
        return layouts

    def with_themselves(self, layouts: tuple[Layout, ...]) -> Pairs:
        """Each layout with itself; the same object for the same tuple."""
        return self._paired(layouts, False)

    def with_copies(self, layouts: tuple[Layout, ...]) -> Pairs:
        """Each layout with itself and with those that are coarser; the same object for the same tuple."""
        return self._paired(layouts, True)

    def _paired(self, layouts: tuple[Layout, ...], copies: bool) -> Pairs:
        key = (id(layouts), copies)
        if key not in self.paired:  # what the identity is of is kept alive here
            pairs = Pairs.of((k, c) for k in layouts for c in (k, *(self.coarser(k) if copies else ())))
            self.paired[key] = (layouts, pairs)
        return self.paired[key][1]

    def local_bytes(self, type: TensorType, layouts: tuple[Layout, ...]) -> Array:
        """Bytes of one device's piece of a tensor of ``type`` in each of some layouts."""
        number = self._number(layouts)
        if number not in self.shards:
            once, at = self.distinct[number]
            self.shards[number] = np.array([k.shards(self.mesh.sizes) for k in once], dtype=np.float64)[at]
        return np.asarray(np.ceil(type.nbytes / self.shards[number]))

    def together(self, parts: tuple[tuple[Layout, ...], ...]) -> tuple[Layout, ...]:
        """All layouts of some tuples, sorted; the same object for the same tuples."""
        key = tuple(map(id, parts))
        if key not in self.unions:
            self.unions[key] = (parts, tuple(sorted({k for part in parts for k in part})))
        return self.unions[key][1]

    def resharding(
        self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], weight: float = 1.0
    ) -> Array:
        """Seconds of resharding: ``[i, j]`` from the i-th source to the j-th target. Nobody writes to it.

        Args:
            type: of the value.
            sources, targets: layouts.
            weight: how often a step.
        """
        # Hashing long tuples of layouts costs more than all else; what the identities are of is kept alive here.
        identity = (type, id(sources), id(targets), weight)
        known = self.by_identity.get(identity)
        if known is not None:
            return known[2]
        seconds = self._once(type, sources, targets, refills=True)
        if weight != 1.0:
            seconds = seconds * weight
            self.entries += seconds.size
        self.by_identity[identity] = (sources, targets, seconds)
        return seconds

    def nearer(
        self,
        type: TensorType,
        stored: tuple[Layout, ...],
        used: tuple[Layout, ...],
        targets: tuple[Layout, ...],
        weight: float,
    ) -> Array:
        """Seconds of resharding from the nearer of two layouts that a value exists in: ``stored[i]`` or ``used[i]``.

        Args:
            type: of the value.
            stored: layouts in which it is stored.
            used: layouts of its copies, as many.
            targets: layouts that are wanted.
            weight: how often a step.
        """
        if stored is used:
            return self.resharding(type, stored, targets, weight)
        identity = (type, id(stored), id(used), id(targets), weight)
        if identity not in self.nearest:
            here_s, copies_s = (self.resharding(type, layouts, targets, weight) for layouts in (stored, used))
            # The path alone says which is nearer, as in `Routes`.
            here, copies = (self._once(type, layouts, targets, refills=False) for layouts in (stored, used))
            seconds = np.where(copies < here, copies_s, here_s)
            self.entries += seconds.size
            self.nearest[identity] = (stored, used, targets, seconds)
        return self.nearest[identity][3]

    def _number(self, layouts: Sequence[Layout]) -> int:
        """The number of a tuple of layouts, equal for equal ones; each object is hashed once."""
        known = self.numbers.get(id(layouts))
        if known is None:
            key = tuple(layouts)
            number = self.by_layouts.setdefault(key, len(self.by_layouts))
            if number == len(self.distinct):
                once = {k: i for i, k in enumerate(dict.fromkeys(key))}
                self.distinct.append((tuple(once), np.array([once[k] for k in key], dtype=np.int64)))
            known = self.numbers[id(layouts)] = (layouts, number)
        return known[1]

    def _once(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], *, refills: bool) -> Array:
        refills = refills and self.cost.refills
        key = (type, self._number(sources), self._number(targets), refills)
        seconds = self.matrices.get(key)
        if seconds is None:
            (rows, row_at), (columns, column_at) = self.distinct[key[1]], self.distinct[key[2]]
            seconds = self.paths.cost_matrix(type, rows, columns)
            if refills:
                sends = self.messages.cost_matrix(type, rows, columns) > 0
                refill_s = np.asarray(self.cost.refill_s(self.local_bytes(type, rows)))
                seconds = seconds + sends * refill_s[:, None]
            seconds = seconds[np.ix_(row_at, column_at)]
            self.entries += seconds.size
            self.matrices[key] = seconds
        return seconds
