"""Resharding: the cheapest steps from one layout to another.

PROVISIONAL
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.ir import Layout, TensorType

#: (kind, bytes of the full tensor as one group sees it, axes) -> seconds
CollectiveCost = Callable[[str, float, tuple[str, ...]], float]
_LOCAL_S = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One change of layout. ``kind`` is a collective's name, "slice" or "mask"."""

    kind: str
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1
    reduce: str = "sum"


@dataclass
class PathTables:
    """Cheapest paths between layouts on one mesh."""

    mesh: LogicalMesh
    cost: CollectiveCost
    found: dict[tuple[TensorType, Layout], dict[Layout, tuple[float, tuple[Step, ...]]]] = field(default_factory=dict)

    def moves(self, type: TensorType, at: Layout) -> list[tuple[Step, Layout, float]]:
        sizes = self.mesh.sizes
        axes = [a for a in self.mesh.names if sizes[a] > 1]
        sets = [c for r in range(1, len(axes) + 1) for c in itertools.combinations(axes, r)]
        out: list[tuple[Step, Layout, float]] = []
        local = type.nbytes / at.shards(sizes)

        def add(step: Step, to: Layout, full: float | None) -> None:
            if to.fits(type.shape, sizes):
                out.append((step, to, _LOCAL_S if full is None else self.cost(step.kind, full, step.axes)))

        used = set(at.axes) | set(at.partial)
        for c in sets:
            n = int(np.prod([sizes[a] for a in c]))
            if set(c) <= set(at.partial):
                rest = tuple(a for a in at.partial if a not in c)
                red = at.reduce if rest else "sum"
                add(Step("all-reduce", c, reduce=at.reduce), Layout(at.dims, rest, red), local)
                if at.reduce == "sum":
                    for d in range(type.rank):
                        dims = tuple(x + c if i == d else x for i, x in enumerate(at.dims))
                        add(Step("reduce-scatter", c, d), Layout(dims, rest, red), local)
            for d, dim in enumerate(at.dims):
                if len(dim) >= len(c) and dim[len(dim) - len(c):] == c:
                    short = tuple(x[: len(x) - len(c)] if i == d else x for i, x in enumerate(at.dims))
                    add(Step("all-gather", c, d), Layout(short, at.partial, at.reduce), local * n)
                    for t in range(type.rank):
                        if t != d:
                            dims = tuple(x + c if i == t else x for i, x in enumerate(short))
                            add(Step("all-to-all", c, d, t), Layout(dims, at.partial, at.reduce), local * n)
            if len(c) == 1 and not used & set(c):
                for d in range(type.rank):
                    dims = tuple(x + c if i == d else x for i, x in enumerate(at.dims))
                    add(Step("slice", c, d), Layout(dims, at.partial, at.reduce), None)
                if type.dtype != "bool" and not type.dtype.startswith("key<") and at.reduce == "sum":
                    p = tuple(a for a in self.mesh.names if a in at.partial or a in c)
                    add(Step("mask", c), Layout(at.dims, p, "sum"), None)
        return out

    def _from(self, type: TensorType, source: Layout) -> dict[Layout, tuple[float, tuple[Step, ...]]]:
        key = (type, source)
        if key not in self.found:
            done: dict[Layout, tuple[float, tuple[Step, ...]]] = {}
            heap: list[tuple[float, int, tuple[Step, ...], Layout]] = [(0.0, 0, (), source)]
            while heap:
                cost, n, steps, at = heapq.heappop(heap)
                if at in done:
                    continue
                done[at] = (cost, steps)
                for step, to, c in self.moves(type, at):
                    if to not in done:
                        heapq.heappush(heap, (cost + c, n + 1, (*steps, step), to))
            self.found[key] = done
        return self.found[key]

    def path(self, type: TensorType, source: Layout, target: Layout) -> tuple[Step, ...]:
        return self._from(type, source)[target][1]

    def seconds(self, type: TensorType, source: Layout, target: Layout) -> float:
        got = self._from(type, source).get(target)
        return np.inf if got is None else got[0]

    def cost_matrix(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> NDArray[np.float64]:
        return np.array([[self.seconds(type, s, t) for t in targets] for s in sources], float)

    def communication(self, type: TensorType, source: Layout, target: Layout) -> list[tuple[str, int, tuple[str, ...]]]:
        out = []
        at = source
        for step in self.path(type, source, target):
            n = int(np.prod([self.mesh.sizes[a] for a in step.axes]))
            local = type.nbytes / at.shards(self.mesh.sizes)
            if step.kind not in ("slice", "mask"):
                full = local * n if step.kind in ("all-gather", "all-to-all") else local
                out.append((step.kind, int(full), step.axes))
            at = next(to for s, to, _ in self.moves(type, at) if s == step)
        return out
