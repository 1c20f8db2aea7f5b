"""Layouts of tensors on one mesh and seconds of resharding between them, cached by shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Layout, TensorType
from autopar.search.intra.draft import Array
from autopar.search.resharding import path_tables
from autopar.sharding import Factor, Rule, strategies


@dataclass
class LayoutTable:
    """What `build` asks of layouts. One a mesh and cost model."""

    mesh: LogicalMesh
    cost: CostModel
    known: dict[tuple[TensorType, bool], tuple[Layout, ...]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, tuple[Layout, ...], tuple[Layout, ...]], Array] = field(default_factory=dict)

    by_identity: dict[tuple[TensorType, int, int], tuple[object, object, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = path_tables(self.mesh, self.cost)

    def all(self, type: TensorType, partial: bool = False) -> tuple[Layout, ...]:
        """Every layout of ``type``, replicated first; with ``partial`` also those that are partial sums."""
        key = (type, partial)
        if key not in self.known:
            if type.dtype.startswith("key<") or type.size == 0:
                self.known[key] = (Layout.replicated(type.rank),)
            else:
                labels = tuple(range(type.rank))
                rule = Rule(tuple(Factor(n) for n in type.shape), (labels,), (labels,), ((0,),) if partial else ())
                found = strategies(rule, (type,), (type,), self.mesh)
                self.known[key] = tuple(s.operand_layouts[0] for s in found)
        return self.known[key]

    def coarser(self, layout: Layout) -> list[Layout]:
        """Layouts that gathering some axes of ``layout`` leads to, itself left out."""
        axes = sorted(layout.axes)
        found = []
        for bits in range(1, 2 ** len(axes)):
            gone = {a for i, a in enumerate(axes) if bits >> i & 1}
            found.append(Layout(tuple(tuple(a for a in dim if a not in gone) for dim in layout.dims)))
        return found

    def resharding(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> Array:
        """Seconds of resharding once: ``[i, j]`` from the i-th source to the j-th target."""
        known = self.by_identity.get((type, id(sources), id(targets)))
        if known is not None:
            return known[2]
        key = (type, tuple(sources), tuple(targets))
        found = self.matrices.get(key)
        if found is None:
            rows, columns = sorted(set(key[1])), sorted(set(key[2]))
            row_at, column_at = {k: i for i, k in enumerate(rows)}, {k: i for i, k in enumerate(columns)}
            small = self.paths.cost_matrix(type, rows, columns)
            found = small[np.ix_([row_at[k] for k in key[1]], [column_at[k] for k in key[2]])]
            self.matrices[key] = found
        # Hashing long tuples of layouts costs more than all else; what the identities are of is kept alive here.
        self.by_identity[type, id(sources), id(targets)] = (sources, targets, found)
        return found
