"""Resharding: the cheapest steps from one layout of a tensor to another, and what they cost.

What planning counts, what a plan records and what lowering emits all come from `PathTables`, so that a
prediction is about the very collectives that are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.errors import AutoparError
from autopar.ir import Layout, TensorType
from autopar.ir.formats import WireFormat
from autopar.ir.types import item_bytes
from autopar.sharding.paths import (
    Divisors,
    Indices,
    LayoutGraph,
    ReshardStep,
    after,
    bare,
    communication,
    divisors,
    full_bytes,
    has_format,
    layout_graph,
    mesh_axes,
    messages,
)

__all__ = ["CollectiveCost", "LocalCost", "PathTable", "PathTables", "ReshardStep", "after", "communication"]

#: (kind, bytes of the full tensor as one group of devices sees it, axes in mesh order) -> seconds.
CollectiveCost: TypeAlias = Callable[[str, float, tuple[str, ...]], float]

#: Bytes that one device reads in a step that sends nothing -> seconds.
LocalCost: TypeAlias = Callable[[float], float]

# Lengths of paths are integers, ``seconds / unit * _STEPS + steps``: sums are exact, so that every order of
# adding gives the same paths, and of equally fast paths the one with fewer steps is shorter. The dearest
# step has at most 2**_BITS units.
_BITS = 48
_STEPS = 64
_UNREACHED = 1 << 61

# Candidates compared at a time when paths are searched: few enough to stay in a cache near the core.
_BLOCK = 1 << 15


def _nothing(bytes: float) -> float:
    """Rearranging is free unless the user of the tables says what it costs."""
    return 0.0


def _nanosecond(bytes: float) -> float:
    """A local step is fused into its neighbours: nearly free, but not to be taken without need."""
    return 1e-9


@dataclass(eq=False)
class PathTable:
    """Cheapest paths between the layouts of a graph, for tensors of a number of bytes.

    Args:
        graph: layouts and steps.
        weights: length of each step of the graph.
        unit_s: seconds of one unit of length.
        rows: by source node, the length of the path to every node. Filled when asked for.
    """

    graph: LayoutGraph
    weights: Indices
    unit_s: float
    rows: dict[int, Indices] = field(default_factory=dict)

    def row(self, source: int) -> Indices:
        """Lengths of the paths from node ``source``."""
        self.solve([source])
        return self.rows[source]

    def solve(self, sources: Sequence[int]) -> None:
        """Fills the rows of ``sources``, all together (Bellman and Ford, a few rounds)."""
        missing = sorted(set(sources) - self.rows.keys())
        block = max(1, _BLOCK // max(1, len(self.weights)))
        for start in range(0, len(missing), block):
            some = missing[start : start + block]
            lengths = self._lengths(np.array(some, np.int64))
            self.rows.update((s, lengths[:, k].copy()) for k, s in enumerate(some))

    def _lengths(self, sources: Indices) -> Indices:
        graph = self.graph
        lengths = np.full((len(graph.layouts), len(sources)), _UNREACHED, np.int64)
        lengths[sources, np.arange(len(sources))] = 0
        entered = np.flatnonzero(np.diff(graph.first_in))
        starts = graph.first_in[entered]
        weights = self.weights[:, None]
        while len(entered):
            through = np.minimum.reduceat(lengths[graph.sources] + weights, starts, axis=0)
            old = lengths[entered]
            new = np.minimum(old, through)
            if np.array_equal(old, new):
                break
            lengths[entered] = new
        return lengths

    def in_seconds(self, lengths: Indices) -> NDArray[np.float64]:
        """Packed lengths of paths as seconds; infinity where no path leads."""
        return np.where(lengths < _UNREACHED, (lengths // _STEPS) * self.unit_s, np.inf)

    def steps(self, source: int, target: int) -> tuple[ReshardStep, ...] | None:
        """The shortest path between two nodes; of several the one that comes first in the graph's order."""
        row = self.row(source)
        if row[target] >= _UNREACHED:
            return None
        graph = self.graph
        steps: list[ReshardStep] = []
        at = target
        while at != source:
            first, last = graph.first_in[at], graph.first_in[at + 1]
            fits = row[graph.sources[first:last]] + self.weights[first:last] == row[at]
            edge = int(first + np.argmax(fits))
            steps.append(graph.steps[edge])
            at = int(graph.sources[edge])
        return tuple(reversed(steps))


class Sent(NamedTuple):
    """A collective on a path.

    Args:
        kind: of the collective.
        full_bytes: bytes of the tensor that one group of devices gathers, sums or exchanges.
        axes: mesh axes.
        seconds: with those in which devices rearrange what interleaves.
        wire: format that it sends codes of; "" for numbers as they are.
    """

    kind: str
    full_bytes: int
    axes: tuple[str, ...]
    seconds: float
    wire: str = ""


@dataclass(eq=False)
class PathTables:
    """Cheapest paths between layouts of all tensors on one mesh. Keep one a mesh: it remembers.

    Args:
        mesh: the logical mesh.
        cost: seconds of a collective.
        local: seconds of a step that sends nothing.
        rearrange: seconds in which a device rearranges bytes that shards interleave in.
        wire: text of the `autopar.ir.formats.WireFormat` in which gathers and sums are sent, or "": as they are.
        narrow: by such a text the tables of the same mesh for values that are sent so.
        graphs, tables, by_type: graphs of layouts, and tables, by what they depend on.
        bares, places: tuples of layouts without axes of one device, and their numbers in graphs, by identity.
    """

    mesh: LogicalMesh
    cost: CollectiveCost
    local: LocalCost = _nanosecond
    rearrange: LocalCost = _nothing
    wire: str = ""
    narrow: dict[str, PathTables] = field(default_factory=dict)
    graphs: dict[tuple[Divisors, tuple[str, ...]], LayoutGraph] = field(default_factory=dict)
    tables: dict[tuple[Divisors, tuple[str, ...], int], PathTable] = field(default_factory=dict)
    by_type: dict[tuple[TensorType, frozenset[str]], PathTable] = field(default_factory=dict)
    bares: dict[tuple[int, int], tuple[object, tuple[Layout, ...], frozenset[str]]] = field(default_factory=dict)
    places: dict[tuple[int, int], tuple[object, object, Indices]] = field(default_factory=dict)

    def sending(self, wire: str) -> PathTables:
        """The tables for values that are sent in the format ``wire``; "" is as they are."""
        if wire == self.wire:
            return self
        if wire not in self.narrow:
            self.narrow[wire] = PathTables(
                self.mesh, self.cost, self.local, self.rearrange, wire=wire, graphs=self.graphs, bares=self.bares
            )
        return self.narrow[wire]

    def table(self, type: TensorType, reductions: Iterable[str] = ()) -> PathTable:
        """The table for ``type``.

        Args:
            type: types of equal bytes, dims that the same axes divide, and reductions share a table.
            reductions: kinds of reduction that the layouts in question are partial in, besides sums.

        Paths may go through partial sums of all numbers; bool is never partial in a sum, keys in nothing.
        "and" and "or" are for bool: of integers they are bitwise, which no collective does.
        """
        wanted = frozenset(reductions)
        if (type, wanted) not in self.by_type:
            self.by_type[type, wanted] = self._table(type, wanted)
        return self.by_type[type, wanted]

    def _table(self, type: TensorType, reductions: frozenset[str]) -> PathTable:
        kinds = {"sum", *reductions} & set(_reductions(type.dtype))
        split = divisors(type.shape, mesh_axes(self.mesh))
        key = (split, tuple(sorted(kinds, key=lambda k: (k != "sum", k))))
        table = self.tables.get((*key, type.nbytes))
        if table is None:
            graph = self.graphs.get(key)
            if graph is None:
                graph = self.graphs[key] = layout_graph(mesh_axes(self.mesh), *key)
            table = self.tables[(*key, type.nbytes)] = self._priced(graph, type)
        return table

    def _priced(self, graph: LayoutGraph, type: TensorType) -> PathTable:
        prices = [
            self._narrow_price(kind, type, shard_counts, axes)
            if self.wire and has_format(kind, "sum")
            else self._price(kind, math.ceil(type.nbytes / shard_counts), axes, interleaved)
            for kind, axes, shard_counts, interleaved in graph.prices
        ]
        dearest = max((p for p in prices if p < math.inf), default=0.0)
        unit_s = math.ldexp(1.0, math.frexp(dearest)[1] - _BITS) if dearest else 1.0
        lengths = [_UNREACHED if p == math.inf else round(p / unit_s) * _STEPS + 1 for p in prices]
        return PathTable(graph, np.array(lengths, np.int64)[graph.price_of] if lengths else graph.price_of, unit_s)

    def _price(self, kind: str, local_bytes: int, axes: tuple[str, ...], interleaved: bool) -> float:
        if kind in ("slice", "mask"):
            seconds = self.local(local_bytes)
        else:
            full = full_bytes(kind, local_bytes, self.mesh.group_size(axes))
            seconds = self.cost(kind, full, axes) + (self.rearrange(full) if interleaved else 0.0)
        if not seconds >= 0:
            raise ValueError(f"the cost of {kind} over {'+'.join(axes)} is {seconds!r} s; it must be 0 or more")
        return seconds

    def _narrow_price(self, kind: str, type: TensorType, shard_counts: int, axes: tuple[str, ...]) -> float:
        """Seconds of a step in the format: its collectives, and passes over memory that encode and decode."""
        elements, group = -(-type.size // shard_counts), self.mesh.group_size(axes)
        sent = messages(kind, elements, group, WireFormat.parse(self.wire))
        return sum(self.cost(k, full, axes) for k, full in sent) + self._encoding_s(kind, type, elements, group)

    def _encoding_s(self, kind: str, type: TensorType, elements: int, group: int) -> float:
        """Seconds in which a device encodes what it sends in a step and decodes what it gets: passes over memory."""
        item = item_bytes(type.dtype)
        messages_bytes = sum(
            full / group * (1 if k == "all-to-all" else 1 + 1 / group)
            for k, full in messages(kind, elements, group, WireFormat.parse(self.wire))
        )
        results = {"all-gather": elements * group, "reduce-scatter": elements / group}.get(kind, elements)
        return self.rearrange((elements * item + messages_bytes + results * item) / 2)

    def seconds(self, type: TensorType, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest path from one layout to another; infinity where there is none."""
        return float(self.cost_matrix(type, (source,), (target,))[0, 0])

    def cost_matrix(
        self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> NDArray[np.float64]:
        """Seconds of the cheapest paths: ``[i, j]`` from the i-th source to the j-th target.

        Args:
            type: type of the whole tensor.
            sources: layouts that it may be in.
            targets: layouts that it may be wanted in.

        Zero where both are one layout. Infinity where no steps lead from one to the other, or one does not fit
        the shape.
        """
        (froms, reduced), (tos, reduced_to) = self._bare_once(type, sources), self._bare_once(type, targets)
        table = self.table(type, reduced | reduced_to)
        rows, columns = self._places(table.graph, froms), self._places(table.graph, tos)
        inside = rows >= 0
        costs = np.full((len(rows), len(columns)), np.inf)
        if inside.any():
            starts = rows[inside].tolist()
            table.solve(starts)
            lengths = np.stack([table.rows[row] for row in starts])[:, columns]
            costs[inside] = np.where(columns >= 0, table.in_seconds(lengths), np.inf)
        for i in np.flatnonzero(~inside):
            costs[i, [j for j, k in enumerate(tos) if k == froms[i]]] = 0.0
        return costs

    def _bare_once(self, type: TensorType, layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], frozenset[str]]:
        """`_bare`, and the kinds of reduction of all; a tuple of layouts is looked at once."""
        known = self.bares.get((id(layouts), type.rank))
        if known is None or known[0] is not layouts:
            bare = tuple(self._bare(type, layouts))
            known = (layouts, bare, frozenset(k.reduce for k in bare))
            if isinstance(layouts, tuple):  # the key is an identity; what it is of is kept alive here
                self.bares[id(layouts), type.rank] = known
        return known[1], known[2]

    def _places(self, graph: LayoutGraph, layouts: tuple[Layout, ...]) -> Indices:
        """Numbers of layouts in a graph; -1 for those that are not of it."""
        known = self.places.get((id(graph), id(layouts)))
        if known is None or known[0] is not layouts or known[1] is not graph:
            numbers = np.array([graph.index.get(k, -1) for k in layouts], np.int64)
            known = self.places[id(graph), id(layouts)] = (layouts, graph, numbers)
        return known[2]

    def path(self, type: TensorType, source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
        """The cheapest steps from ``source`` to ``target``, fewer where seconds are equal; always the same ones.

        Args:
            type: type of the whole tensor.
            source: layout that it is in.
            target: layout that it is wanted in.

        Raises:
            AutoparError: no steps lead there, or a layout does not fit the shape.
        """
        start, end = self._bare(type, (source, target))
        if start == end:
            return ()
        table = self.table(type, (start.reduce, end.reduce))
        index = table.graph.index
        steps = table.steps(index[start], index[end]) if start in index and end in index else None
        if steps is None:
            raise AutoparError(
                f"{type} cannot go from {source} to {target} on a {self.mesh} mesh",
                cause="the axes do not divide the dims, or the dtype has no such reduction",
            )
        return tuple(s.sent_as(self.wire) for s in steps) if self.wire else steps

    def communication(self, type: TensorType, source: Layout, target: Layout) -> list[Sent]:
        """Collectives on the path from one layout to another, in order."""
        sent = []
        (at,) = self._bare(type, (source,))
        for step in self.path(type, source, target):
            for n, (kind, full, axes) in enumerate(communication(step, type, at, self.mesh)):
                local_s = 0.0
                if step.wire and n == 0:
                    elements = type.size // at.shards(self.mesh.sizes)
                    local_s = self._encoding_s(step.kind, type, elements, self.mesh.group_size(axes))
                elif step.interleaves and not step.wire:
                    local_s = self.rearrange(full)
                sent.append(Sent(kind, full, axes, self.cost(kind, full, axes) + local_s, step.wire))
            at = after(step, at, self.mesh)
        return sent

    def _bare(self, type: TensorType, layouts: Sequence[Layout]) -> list[Layout]:
        wrong = [k for k in layouts if len(k.dims) != type.rank]
        if wrong:
            raise ValueError(f"{wrong[0]} is not a layout of {type}, which has {type.rank} dims")
        return [bare(k, self.mesh) for k in layouts]


def _reductions(dtype: str) -> tuple[str, ...]:
    """Kinds of reduction that a collective can do on ``dtype``."""
    if dtype == "bool":
        return ("max", "min", "and", "or")
    if dtype.startswith("c"):
        return ("sum",)
    return () if dtype.startswith(("key<", "tok")) else ("sum", "max", "min")
