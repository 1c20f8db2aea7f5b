"""Splits of space that constraints on images name, kept along the chain of operators that read them.

A constraint fixes where an input lies; the operators that read it are free. Halos of small images take longer than
repeated work, so that a free chain would leave the split at its first convolution. Where a constraint splits a dim that
windows slide over, all operators keep that split whose rule can, until one has no such strategy or sums the dim away.
`SpaceSplits.kept` is called for each operator in the order of the walk. Splits of other dims are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import LogicalMesh
from autopar.ir import Graph, Layout, Literal, Operator
from autopar.ir.primitives import WINDOWED
from autopar.search.constraints import FREE, SPLIT, Constraint
from autopar.search.intra.operators import OperatorOptions
from autopar.sharding import Strategy

Shards = tuple[int, ...]


@dataclass
class SpaceSplits:
    """Shards of the dims of values that a constraint on an input splits.

    Args:
        mesh: the logical mesh.
        shards: by value the shards of each dim, `FREE` where any number will do.
        in_space: values among them that windows have slid over, or that are computed from such.
        cache: options by those that they restrict and by the shards of the operands; the first keep the key alive.
    """

    mesh: LogicalMesh
    shards: dict[str, Shards] = field(default_factory=dict)
    in_space: set[str] = field(default_factory=set)
    cache: dict[tuple[int, tuple[Shards | None, ...]], tuple[OperatorOptions, OperatorOptions | None]] = field(
        default_factory=dict
    )

    @staticmethod
    def of(mesh: LogicalMesh, graph: Graph, constraints: Iterable[Constraint]) -> SpaceSplits:
        """Splits that ``constraints`` on the batch of a graph name."""
        batch = {i.name for i in graph.inputs if i.role == "batch"}
        named = {c.value: tuple(n if n == SPLIT or n > 1 else FREE for n in c.shards) for c in constraints}
        split = {v: s for v, s in named.items() if v in batch and any(n != FREE for n in s)}
        return SpaceSplits(mesh, split)

    def same(self, source: str, value: str, *, first: int = 0) -> None:
        """Gives a value the shards of another one.

        Args:
            source: key of the other one.
            value: key of the value.
            first: number of dims that it has before those of the other one; -1 where it lacks its first.
        """
        if source in self.shards:
            self.shards[value] = (FREE,) * first + self.shards[source][max(0, -first) :]
            if source in self.in_space:
                self.in_space.add(value)

    def kept(self, op: Operator, prefix: str, options: OperatorOptions) -> OperatorOptions:
        """The strategies of ``op`` that keep the splits of its operands; all where none does.

        Args:
            op: the operator.
            prefix: of the keys of its operands and results.
            options: its strategies.
        """
        if not self.shards:
            return options
        keys = ["" if isinstance(o, Literal) else prefix + o for o in op.operands]
        wanted = tuple(self.shards.get(key) for key in keys)
        if not any(wanted):
            return options
        keeping = self._keeping(options, wanted)
        if keeping is None:
            return options
        in_space = any(key in self.in_space for key in keys) or _slides(op, wanted)
        for j, result in enumerate(op.results):
            shards = self._of_result(keeping.strategies, wanted, j)
            if any(n != FREE for n in shards):
                self.shards[prefix + result.name] = shards
                if in_space:
                    self.in_space.add(prefix + result.name)
        return keeping if in_space else options

    def _keeping(self, options: OperatorOptions, wanted: tuple[Shards | None, ...]) -> OperatorOptions | None:
        key = (id(options), wanted)
        if key not in self.cache:
            sizes = dict(self.mesh.axes)
            strategies = tuple(
                s
                for s in options.strategies
                if all(w is None or _splits(w, k, sizes) for w, k in zip(wanted, s.operand_layouts, strict=True))
            )
            self.cache[key] = (options, options.only(strategies) if strategies else None)
        return self.cache[key][1]

    def _of_result(self, strategies: Sequence[Strategy], wanted: tuple[Shards | None, ...], number: int) -> Shards:
        """Shards of a result: of dims that all strategies split over the axes that split a dim of an operand."""
        rank = len(strategies[0].result_layouts[number].dims)
        shards = [FREE] * rank
        for i, of_operand in enumerate(wanted):
            for dim, n in enumerate(of_operand or ()):
                if n == FREE:
                    continue
                for d in range(rank):
                    if all(s.result_layouts[number].dims[d] == s.operand_layouts[i].dims[dim] for s in strategies):
                        shards[d] = n
        return tuple(shards)


def _splits(shards: Shards, layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether a layout, partial or not, has as many shards of each dim as are wanted."""
    counts = [math.prod(sizes[a] for a in axes) for axes in layout.dims]
    return all(w in (FREE, n) or (w == SPLIT and n > 1) for w, n in zip(shards, counts, strict=True))


def _slides(op: Operator, wanted: Sequence[Shards | None]) -> bool:
    """Whether windows of ``op`` slide over a dim of its first operand that has shards."""
    first = wanted[0] if wanted else None
    if first is None:
        return False
    if op.primitive == "conv_general_dilated":
        return any(first[d] != FREE for d in op.ints("lhs_spec")[2:])
    if op.primitive in WINDOWED:
        return any(n != FREE and w > 1 for n, w in zip(first, op.ints("window_dimensions"), strict=True))
    return False
