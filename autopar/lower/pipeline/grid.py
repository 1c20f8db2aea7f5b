"""`Grid`: the devices of all workers as one mesh, whose axes are parts of the axes of every stage's own mesh.

Workers lie one after another, those with the most devices first. The mesh is cut where a worker or an axis of a stage
ends, so that a layout of any stage is one over axes of the grid, and a worker's devices differ in the minor axes alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ClusterError
from autopar.ir import Layout

#: Name of the axis over which workers lie where all have meshes of one shape.
WORKERS = "workers"

Axes = tuple[tuple[str, int], ...]


class OneProgramError(ClusterError):
    """A pipeline cannot be one program on all devices."""


@dataclass(frozen=True)
class Grid:
    """One mesh over the devices of all workers, whose axes the meshes of stages are made of.

    Args:
        axes: (name, size), major first.
        devices: indices of the cluster's devices, in that order.
        workers: by worker the first of its places in ``devices``, and how many it has.
        parts: for each mesh of a stage the axes of the grid that each of its axes is made of, major first.
    """

    axes: Axes
    devices: tuple[int, ...]
    workers: tuple[tuple[int, int], ...]
    parts: Mapping[Axes, Mapping[str, tuple[str, ...]]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes."""
        return tuple(a for a, _ in self.axes)

    def axes_of(self, worker: int) -> Axes:
        """The axes over which a worker's devices lie."""
        count, minor = self.workers[worker][1], 1
        for n in range(len(self.axes), -1, -1):
            if minor == count:
                return self.axes[n:]
            minor *= self.axes[n - 1][1]
        raise AssertionError(f"{count} devices are no run of {self.axes}")

    def layout(self, stage: Axes, layout: Layout) -> Layout:
        """The layout over the axes of the grid that a layout over the axes of a stage's mesh is.

        Args:
            stage: the axes of the stage's mesh.
            layout: over them.
        """
        parts = self.parts[stage]
        dims = tuple(tuple(p for a in dim for p in parts[a]) for dim in layout.dims)
        partial = [p for a in layout.partial for p in parts[a]]
        return Layout(dims, tuple(sorted(partial, key=self.names.index)), layout.reduce)

    def pairs(self, source: int, target: int) -> list[list[tuple[int, int]]]:
        """(from, to) by place of permutes that give every device of a worker what a device of another has.

        A device gets it from the one that agrees with it in the minor axes that both workers have.

        Args:
            source: the worker that has it.
            target: the worker that gets it.
        """
        (first, have), (into, want) = self.workers[source], self.workers[target]
        return [
            [(first + place % have, into + place) for place in range(at, min(at + have, want))]
            for at in range(0, want, have)
        ]


def grid_of(workers: Sequence[tuple[int, ...]], meshes: Sequence[Sequence[Axes]]) -> Grid:
    """The mesh over the devices of all workers.

    Args:
        workers: indices of the devices of each.
        meshes: axes of the meshes of its stages.

    Raises:
        OneProgramError: there is none: sizes of workers or axes do not divide each other.
    """
    shapes = list(dict.fromkeys(axes for some in meshes for axes in some))
    counts = [len(w) for w in workers]
    total = sum(counts)
    ends = {1, total, *counts, *(end for axes in shapes for end in _ends(axes))}
    cuts = sorted(ends)
    if any(b % a for a, b in itertools.pairwise(cuts)):
        raise OneProgramError(
            f"stages with meshes {', '.join(_text(s) for s in shapes)} on {total} devices cannot be one program",
            cause="sizes of their meshes do not divide each other",
            remedy="ask for stages with equally many devices, or a mesh_shape",
        )
    sizes = tuple(b // a for a, b in itertools.pairwise(cuts))
    uniform = len(shapes) == 1 and len(set(counts)) == 1 and all(n > 1 for _, n in shapes[0])
    if uniform:
        axes = ((WORKERS, len(workers)), *shapes[0])
        parts: dict[Axes, Mapping[str, tuple[str, ...]]] = {shapes[0]: {a: (a,) for a, _ in shapes[0]}}
    else:
        axes = tuple((f"part{n}", size) for n, size in reversed(list(enumerate(sizes))))
        by_cut = dict(zip(cuts[1:], range(len(sizes)), strict=True))
        parts = {s: _parts(s, by_cut) for s in shapes}
    order = sorted(range(len(workers)), key=lambda w: (-counts[w], w))
    places: dict[int, tuple[int, int]] = {}
    devices: list[int] = []
    for worker in order:
        places[worker] = len(devices), counts[worker]
        devices += workers[worker]
    return Grid(axes, tuple(devices), tuple(places[w] for w in range(len(workers))), parts)


def _ends(axes: Axes) -> list[int]:
    """Devices in the last axis, in the last two, and so on."""
    return list(itertools.accumulate((n for _, n in reversed(axes)), lambda a, b: a * b))


def _parts(axes: Axes, by_cut: Mapping[int, int]) -> dict[str, tuple[str, ...]]:
    """Parts of the grid of which each axis of a mesh is made, major first."""
    parts: dict[str, tuple[str, ...]] = {}
    minor = 1
    for name, size in reversed(axes):
        end = minor * size
        inside = sorted((n for cut, n in by_cut.items() if minor < cut <= end), reverse=True)
        parts[name] = tuple(f"part{n}" for n in inside)
        minor = end
    return parts


def _text(axes: Axes) -> str:
    return "x".join(str(n) for _, n in axes) or str(math.prod(()))
