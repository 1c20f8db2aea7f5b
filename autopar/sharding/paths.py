"""Steps between layouts, and the graph of all layouts of a tensor that they connect.

Which steps there are depends on the shape only by which axes divide which dims; what they cost depends
only on bytes. So one `LayoutGraph` serves many types, and `autopar.sharding.reshard` adds the seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cluster.mesh import LogicalMesh
from autopar.ir import Layout, TensorType
from autopar.ir.formats import WireFormat

#: Kinds of steps that no device needs another one for.
LOCAL_KINDS = ("slice", "mask")

#: Names and sizes of the mesh axes of size above 1, in mesh order.
Axes = tuple[tuple[str, int], ...]

#: By dim, the sets of axes that together divide it.
Divisors = tuple[frozenset[frozenset[str]], ...]

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class ReshardStep:
    """One change of layout, done by all devices together.

    - ``all-reduce``: ``axes`` leave `Layout.partial`.
    - ``reduce-scatter``: ``axes`` leave `Layout.partial` and split ``dim``, inside what splits it already.
    - ``all-gather``: ``axes``, the last ones of ``dim``, leave it.
    - ``all-to-all``: ``axes``, the last ones of ``dim``, become the last ones of ``to_dim``.
    - ``collective-permute``: the two ``axes`` exchange their places. They are of one size, or neighbours in ``dim``.
    - ``slice``: ``axes``, unused before, split ``dim``, inside what splits it already. Nothing is sent.
    - ``mask``: the value becomes partial over ``axes``, unused before: of a sum the first device of each group
      has the value and the others zeros; of other reductions all keep it. Nothing is sent.

    Args:
        kind: as above.
        axes: mesh axes taken together, major first.
        dim: the tensor dim it is about, or -1.
        to_dim: where an all-to-all moves the axes to, or -1.
        reduce: kind of the reduction, as in `Layout`.
        wire: text of the `autopar.ir.formats.WireFormat` in which it is sent, or "": as it is. A sum is an all-to-all
            of codes, whose terms are decoded and added up, and for an all-reduce a gather of what they make.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1
    reduce: str = "sum"
    wire: str = ""

    @property
    def is_local(self) -> bool:
        """Whether devices send nothing in this step."""
        return self.kind in LOCAL_KINDS

    @property
    def interleaves(self) -> bool:
        """Whether the shards of the collective interleave in the tensor: devices have to rearrange it."""
        return self.dim > 0 and self.kind in ("all-gather", "reduce-scatter")

    def sent_as(self, wire: str) -> ReshardStep:
        """The step in the format ``wire``, where it is one that has a format."""
        return replace(self, wire=wire) if has_format(self.kind, self.reduce) else self


def mesh_axes(mesh: LogicalMesh) -> Axes:
    """The axes of ``mesh`` that have more than one device."""
    return tuple((name, n) for name, n in mesh.axes if n > 1)


def bare(layout: Layout, mesh: LogicalMesh) -> Layout:
    """``layout`` without axes of one device, its partial axes in mesh order. KeyError if an axis is not of the mesh."""
    sizes = mesh.sizes
    dims = tuple(tuple(a for a in dim if sizes[a] > 1) for dim in layout.dims)
    partial = tuple(sorted((a for a in layout.partial if sizes[a] > 1), key=mesh.names.index))
    return Layout(dims, partial, layout.reduce if partial else "sum")


def after(step: ReshardStep, layout: Layout, mesh: LogicalMesh) -> Layout:
    """The layout that ``step`` turns ``layout`` into, which has to be one that the step is for."""
    dims = [list(dim) for dim in layout.dims]
    partial = set(layout.partial)
    match step.kind:
        case "all-reduce":
            partial -= set(step.axes)
        case "reduce-scatter":
            partial -= set(step.axes)
            dims[step.dim] += step.axes
        case "all-gather":
            del dims[step.dim][-len(step.axes) :]
        case "all-to-all":
            del dims[step.dim][-len(step.axes) :]
            dims[step.to_dim] += step.axes
        case "collective-permute":
            swap = dict(zip(step.axes, reversed(step.axes), strict=True))
            dims = [[swap.get(a, a) for a in dim] for dim in dims]
            partial = {swap.get(a, a) for a in partial}
        case "slice":
            dims[step.dim] += step.axes
        case "mask":
            partial |= set(step.axes)
        case _:
            raise ValueError(f"no step is called {step.kind!r}")
    reduce = step.reduce if step.kind == "mask" else layout.reduce
    ordered = tuple(a for a in mesh.names if a in partial)
    return Layout(tuple(map(tuple, dims)), ordered, reduce if ordered else "sum")


def full_bytes(kind: str, local_bytes: int, group: int) -> int:
    """Bytes of the full tensor as one group of devices sees it (M in `autopar.cost.collectives`).

    Args:
        kind: of the step.
        local_bytes: bytes of one device's operand.
        group: devices in a group along the step's axes.
    """
    return local_bytes * group if kind in ("all-gather", "all-to-all") else local_bytes


def has_format(kind: str, reduce: str) -> bool:
    """Whether a step may be sent in a format of its own: gathers and sums."""
    return kind in ("all-gather", "reduce-scatter") or (kind == "all-reduce" and reduce == "sum")


def messages(kind: str, elements: int, group: int, format: WireFormat) -> tuple[tuple[str, int], ...]:
    """(kind, full bytes as of `full_bytes`) of the collectives that a step in a format is.

    Args:
        kind: of the step.
        elements: of one device's operand.
        group: devices in a group along the step's axes.
        format: in which it is sent.
    """
    if kind == "all-gather":
        return (("all-gather", group * format.message_bytes(elements)),)
    chunk_bytes = format.message_bytes(-(-elements // group))
    scattered = ("all-to-all", group * group * chunk_bytes)
    return (scattered,) if kind == "reduce-scatter" else (scattered, ("all-gather", group * chunk_bytes))


def communication(
    step: ReshardStep, type: TensorType, before: Layout, mesh: LogicalMesh
) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """(kind, full bytes as of `full_bytes`, axes in mesh order) of the collectives of a step; none if it sends nothing.

    Args:
        step: what is done.
        type: type of the whole tensor.
        before: the layout that the step starts from.
        mesh: where.
    """
    if step.is_local or type.size == 0:
        return ()
    axes = tuple(a for a in mesh.names if a in step.axes)
    group = mesh.group_size(axes)
    if step.wire:
        elements = type.size // before.shards(mesh.sizes)
        return tuple((k, full, axes) for k, full in messages(step.kind, elements, group, WireFormat.parse(step.wire)))
    return ((step.kind, full_bytes(step.kind, before.local_bytes(type, mesh.sizes), group), axes),)


def divisors(shape: tuple[int, ...], axes: Axes) -> Divisors:
    """Sets of ``axes`` whose sizes together divide each dim of ``shape``."""
    sizes = dict(axes)
    sets = [frozenset(s) for k in range(len(axes) + 1) for s in itertools.combinations(sizes, k)]
    shard_counts = [(s, math.prod(sizes[a] for a in s)) for s in sets]
    return tuple(frozenset(s for s, k in shard_counts if n % k == 0) for n in shape)


@dataclass(frozen=True, eq=False)
class LayoutGraph:
    """All layouts of tensors of one rank and divisibility, and the steps between them.

    Args:
        layouts: the nodes, in a fixed order.
        index: node by layout.
        steps: of the edges, which are sorted by target, then by source.
        sources: node that each edge leaves.
        targets: node that each edge enters.
        first_in: first edge into each node, and at the end the number of edges.
        prices: (kind, axes in mesh order, number of shards before, whether shards interleave) that edges are priced by,
            each once. Shards interleave in what a collective gathers or scatters along another
            dim than the first: devices have to rearrange it.
        price_of: of each edge, which of ``prices``.
    """

    layouts: tuple[Layout, ...]
    index: Mapping[Layout, int]
    steps: tuple[ReshardStep, ...]
    sources: Indices
    targets: Indices
    first_in: Indices
    prices: tuple[tuple[str, tuple[str, ...], int, bool], ...]
    price_of: Indices


@lru_cache(maxsize=1024)
def layout_graph(axes: Axes, allowed: Divisors, reductions: tuple[str, ...]) -> LayoutGraph:
    """The graph for tensors that may be split as ``allowed`` says.

    Args:
        axes: from `mesh_axes`.
        allowed: from `divisors`.
        reductions: kinds of reduction in which the tensor may be partial.
    """
    layouts = tuple(_layouts(axes, allowed, reductions))
    index = {layout: i for i, layout in enumerate(layouts)}
    sizes = dict(axes)
    names = tuple(sizes)
    edges: list[tuple[int, int, ReshardStep]] = []
    for i, layout in enumerate(layouts):
        for step, to in _moves(layout, axes, reductions):
            j = index.get(to)
            if j is not None:
                edges.append((j, i, step))
    # Stable: of the steps between the same two layouts the order of `_moves` stays.
    edges.sort(key=lambda e: e[:2])
    shard_counts = [layout.shards(sizes) for layout in layouts]
    numbers: dict[tuple[str, tuple[str, ...], int, bool], int] = {}
    price_of = []
    for _, i, step in edges:
        price = (step.kind, tuple(a for a in names if a in step.axes), shard_counts[i], step.interleaves)
        price_of.append(numbers.setdefault(price, len(numbers)))
    targets = np.array([j for j, _, _ in edges], np.int64)
    return LayoutGraph(
        layouts=layouts,
        index=index,
        steps=tuple(step for _, _, step in edges),
        sources=np.array([i for _, i, _ in edges], np.int64),
        targets=targets,
        first_in=np.searchsorted(targets, np.arange(len(layouts) + 1)),
        prices=tuple(numbers),
        price_of=np.array(price_of, np.int64),
    )


def _layouts(axes: Axes, allowed: Divisors, reductions: tuple[str, ...]) -> Iterator[Layout]:
    """Every layout, whole ones first. Axes may split a dim in any order: on the way that may be cheapest."""
    rank = len(allowed)
    names = tuple(name for name, _ in axes)
    for places in itertools.product(range(-1, rank + bool(reductions)), repeat=len(axes)):
        by_dim = [tuple(a for a, p in zip(names, places, strict=True) if p == d) for d in range(rank)]
        if not all(frozenset(dim) in sets for dim, sets in zip(by_dim, allowed, strict=True)):
            continue
        partial = tuple(a for a, p in zip(names, places, strict=True) if p == rank)
        for dims in itertools.product(*map(itertools.permutations, by_dim)):
            for reduce in reductions if partial else ("sum",):
                yield Layout(dims, partial, reduce)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Sets of axes that are not empty, small ones first."""
    for k in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, k)


def _moves(at: Layout, axes: Axes, reductions: tuple[str, ...]) -> Iterator[tuple[ReshardStep, Layout]]:
    """Steps from ``at`` and where they lead; some lead to layouts that the shape does not allow."""
    names = tuple(name for name, _ in axes)
    dims, partial, reduce = at.dims, at.partial, at.reduce
    for some in _subsets(partial):
        rest = tuple(a for a in partial if a not in some)
        kind = reduce if rest else "sum"
        yield ReshardStep("all-reduce", some, reduce=reduce), Layout(dims, rest, kind)
        if reduce == "sum":
            for d in range(len(dims)):
                yield ReshardStep("reduce-scatter", some, d), Layout(_extended(dims, d, some), rest, kind)
    for d, dim in enumerate(dims):
        for k in range(1, len(dim) + 1):
            some = dim[-k:]
            shorter = (*dims[:d], dim[:-k], *dims[d + 1 :])
            yield ReshardStep("all-gather", some, d), Layout(shorter, partial, reduce)
            for to in range(len(dims)):
                if to != d:
                    yield ReshardStep("all-to-all", some, d, to), Layout(_extended(shorter, to, some), partial, reduce)
    used = {*at.axes, *partial}
    for some in _subsets(tuple(a for a in names if a not in used)):
        for d in range(len(dims)):
            yield ReshardStep("slice", some, d), Layout(_extended(dims, d, some), partial, reduce)
        for kind in reductions:
            if not partial or kind == reduce:
                more = tuple(a for a in names if a in partial or a in some)
                yield ReshardStep("mask", some, reduce=kind), Layout(dims, more, kind)
    yield from _permutes(at, axes)


def _permutes(at: Layout, axes: Axes) -> Iterator[tuple[ReshardStep, Layout]]:
    """Exchanges of two axes. Renaming axes of one size, or turning neighbours in a dim, keeps shards whole."""
    sizes = dict(axes)
    for a, b in itertools.combinations(sizes, 2):
        if sizes[a] == sizes[b]:
            swap = {a: b, b: a}
            dims = tuple(tuple(swap.get(c, c) for c in dim) for dim in at.dims)
            held = {swap.get(c, c) for c in at.partial}
            to = Layout(dims, tuple(c for c in sizes if c in held), at.reduce)
            if to != at:
                yield ReshardStep("collective-permute", (a, b)), to
    for d, dim in enumerate(at.dims):
        for k, (a, b) in enumerate(itertools.pairwise(dim)):
            if sizes[a] != sizes[b]:
                turned = (*dim[:k], b, a, *dim[k + 2 :])
                dims = (*at.dims[:d], turned, *at.dims[d + 1 :])
                yield ReshardStep("collective-permute", (a, b), d), Layout(dims, at.partial, at.reduce)


def _extended(dims: tuple[tuple[str, ...], ...], d: int, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return (*dims[:d], (*dims[d], *axes), *dims[d + 1 :])
