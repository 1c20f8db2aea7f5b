"""Sharded tensors in numpy: one array a device, and what each resharding step does to them.

Written from the definition of the steps alone, so that it can judge planner and lowering.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.cluster.mesh import Link, LogicalMesh
from autopar.ir import Layout
from autopar.sharding.reshard import ReshardStep

Coordinates = tuple[int, ...]
Pieces = dict[Coordinates, np.ndarray]

_REDUCE = {
    "sum": lambda a, b: a + b,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}


def logical_mesh(*sizes: int) -> LogicalMesh:
    """A mesh with axes x, y, z of these sizes, slower links first."""
    names = "xyzw"[: len(sizes)]
    links = tuple(Link(1e9 * (1 + 3 * i), 1e-6) for i in range(len(sizes)))
    return LogicalMesh(tuple(zip(names, sizes, strict=True)), links)


def devices(mesh: LogicalMesh) -> list[Coordinates]:
    """Coordinates of all devices, in mesh order."""
    return list(itertools.product(*(range(n) for n in mesh.shape)))


def number(at: Coordinates, axes: Sequence[str], mesh: LogicalMesh) -> int:
    """Number of a device in its group along ``axes``, major first."""
    found = 0
    for a in axes:
        found = found * mesh.sizes[a] + at[mesh.names.index(a)]
    return found


def group(at: Coordinates, axes: Sequence[str], mesh: LogicalMesh) -> list[Coordinates]:
    """The group of a device along ``axes``, in the order of `number`."""
    same = [i for i, name in enumerate(mesh.names) if name not in axes]
    members = [d for d in devices(mesh) if all(d[i] == at[i] for i in same)]
    return sorted(members, key=lambda d: number(d, axes, mesh))


def cut(whole: np.ndarray, layout: Layout, at: Coordinates, mesh: LogicalMesh) -> np.ndarray:
    """The part of ``whole`` that the device has; partial axes are ignored."""
    for d, axes in enumerate(layout.dims):
        n = math.prod(mesh.sizes[a] for a in axes)
        whole = np.split(whole, n, axis=d)[number(at, axes, mesh)] if n > 1 else whole
    return whole


def spread(whole: np.ndarray, layout: Layout, mesh: LogicalMesh, rng: np.random.Generator) -> Pieces:
    """``whole`` in ``layout``; where that is partial, in terms drawn from ``rng``."""
    count = math.prod(mesh.sizes[a] for a in layout.partial)
    terms = _terms(whole, count, layout.reduce, rng)
    return {at: cut(terms[number(at, layout.partial, mesh)], layout, at, mesh) for at in devices(mesh)}


def _terms(whole: np.ndarray, count: int, reduce: str, rng: np.random.Generator) -> list[np.ndarray]:
    if whole.dtype == np.bool_:
        noise = [rng.random(whole.shape) < 0.5 for _ in range(count - 1)]
        others = [whole | n if reduce in ("and", "min") else whole & n for n in noise]
        terms = [whole, *others]
    else:
        noise = [rng.integers(0, 4, whole.shape).astype(whole.dtype) for _ in range(count - 1)]
        if reduce == "sum":
            terms = [whole - sum(noise[1:], noise[0]) if noise else whole, *noise]
        else:
            terms = [whole, *((np.minimum if reduce == "max" else np.maximum)(whole, n) for n in noise)]
    return [terms[i] for i in rng.permutation(count)]


def reduced(arrays: Sequence[np.ndarray], reduce: str) -> np.ndarray:
    """The reduction of ``arrays``."""
    total = arrays[0]
    for a in arrays[1:]:
        total = _REDUCE[reduce](total, a)
    return total


def run(step: ReshardStep, pieces: Pieces, mesh: LogicalMesh) -> Pieces:
    """Every device's piece after ``step``."""
    return {at: _piece(step, pieces, at, mesh) for at in pieces}


def _piece(step: ReshardStep, pieces: Pieces, at: Coordinates, mesh: LogicalMesh) -> np.ndarray:
    members = group(at, step.axes, mesh)
    theirs, own, me, n = [pieces[m] for m in members], pieces[at], members.index(at), len(members)
    match step.kind:
        case "all-reduce":
            return reduced(theirs, step.reduce)
        case "reduce-scatter":
            return np.split(reduced(theirs, "sum"), n, axis=step.dim)[me]
        case "all-gather":
            return np.concatenate(theirs, axis=step.dim)
        case "all-to-all":
            return np.concatenate([np.split(p, n, axis=step.to_dim)[me] for p in theirs], axis=step.dim)
        case "collective-permute":
            # With the axes exchanged this device has the number of the member that holds its new piece.
            return theirs[number(at, step.axes[::-1], mesh)]
        case "slice":
            return np.split(own, n, axis=step.dim)[me]
        case "mask":
            return own if me == 0 or step.reduce != "sum" else np.zeros_like(own)
    raise AssertionError(step)


def check(pieces: Pieces, whole: np.ndarray, layout: Layout, mesh: LogicalMesh) -> None:
    """AssertionError unless ``pieces`` are ``whole`` in ``layout``."""
    assert sorted(pieces) == devices(mesh)
    for at, piece in pieces.items():
        assert piece.dtype == whole.dtype
        finished = reduced([pieces[m] for m in group(at, layout.partial, mesh)], layout.reduce)
        np.testing.assert_array_equal(finished, cut(whole, layout, at, mesh), err_msg=f"{layout} at {at}")
