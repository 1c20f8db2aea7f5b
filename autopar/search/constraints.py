"""Constraints of the user on layouts: the number of shards of each dim.

A constraint says numbers of shards, not mesh axes, so that it means the same on every logical mesh, and on the mesh of
a stage of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from autopar.cluster import LogicalMesh
from autopar.errors import ConstraintError
from autopar.ir import Graph, Layout, Operator, TensorType

#: Shards of a dim: as many as the planner likes; two or more.
FREE: Final = -1
SPLIT: Final = 0


@dataclass(frozen=True)
class Constraint:
    """Constraint on the layout of one input.

    Args:
        value: name of the input.
        shards: for each dim the number of shards; `FREE`, or `SPLIT`.
        text: the constraint as the user said it.
        axes: mesh axes by dim, where these too are fixed.
        stage: the only stage of a pipeline that it holds on; None where it holds wherever the input is.
    """

    value: str
    shards: tuple[int, ...]
    text: str
    axes: tuple[tuple[str, ...], ...] | None = None
    stage: int | None = None

    def holds(self, layout: Layout, sizes: Mapping[str, int]) -> bool:
        """Whether a value in ``layout`` keeps the constraint on a mesh with axes of ``sizes``."""
        return keeps(self.shards, layout, sizes) and self.axes in (None, layout.dims)


@dataclass(frozen=True)
class SharedStages:
    """Stages of another plan, on which the state lies that a step shares with it.

    Args:
        devices: by stage its first device and the number of devices.
        meshes: by stage the sizes of its logical mesh.
        inputs: (name of an input of the step, stage of the other plan on which it lies).
        num_microbatches: of the other plan.
    """

    devices: tuple[tuple[int, int], ...]
    meshes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[str, int], ...]
    num_microbatches: int


def keeps(shards: Sequence[int], layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether ``layout`` splits each dim into as many ``shards`` as are wanted, and is no partial result."""
    if layout.partial:
        return False
    counts = [math.prod(sizes[a] for a in axes) for axes in layout.dims]
    return all(w in (FREE, n) or (w == SPLIT and n > 1) for w, n in zip(shards, counts, strict=True))


def shards_of(op: Operator) -> tuple[int, ...] | None:
    """The shards that the user's code asks for by ``op``; None where it asks for none."""
    if not any(name == "shards" for name, _ in op.attrs):
        return None
    return tuple(op.ints("shards"))


def asked_in_code(graph: Graph) -> list[tuple[Operator, tuple[int, ...]]]:
    """Operators of a graph and of its regions by which the user's code says where a value lies."""
    asked = []
    for op in graph.operators:
        wanted = shards_of(op)
        if wanted is not None:
            asked.append((op, wanted))
        for _, region in op.regions:
            asked += asked_in_code(region)
    return asked


def can_hold(shards: Sequence[int], type: TensorType, sizes: Sequence[int]) -> bool:
    """Whether some layout of ``type`` on a mesh with axes of ``sizes`` keeps ``shards``."""
    axes = [f"a{n}" for n in range(len(sizes))]
    by_name = dict(zip(axes, sizes, strict=True))
    for places in product(range(-1, type.rank), repeat=len(axes)):
        dims = tuple(tuple(a for a, d in zip(axes, places, strict=True) if d == dim) for dim in range(type.rank))
        counts = [math.prod(by_name[a] for a in d) for d in dims]
        divides = all(n % c == 0 for n, c in zip(type.shape, counts, strict=True))
        if divides and keeps(shards, Layout(dims), by_name):
            return True
    return False


def meshes_that_hold(
    meshes: Sequence[LogicalMesh], graph: Graph, constraints: Sequence[Constraint]
) -> tuple[LogicalMesh, ...]:
    """The ``meshes`` on which all constraints hold, and of these those that keep most of the code's own constraints.

    Raises:
        ConstraintError: on no mesh do all hold.
    """
    if constraints:
        types = {i.name: i.type for i in graph.inputs}
        kept = [m for m in meshes if all(_on(m, c.shards, types[c.value]) for c in constraints if c.value in types)]
        if not kept:
            raise cannot_hold(meshes, constraints, types)
        meshes = kept
    asked = [(wanted, op.results[0].type) for op, wanted in asked_in_code(graph)]
    if not asked:
        return tuple(meshes)
    counts = [sum(_on(m, wanted, type) for wanted, type in asked) for m in meshes]
    return tuple(m for m, n in zip(meshes, counts, strict=True) if n == max(counts))


def _on(mesh: LogicalMesh, shards: Sequence[int], type: TensorType) -> bool:
    return can_hold(shards, type, [n for _, n in mesh.axes])


def cannot_hold(
    meshes: Sequence[LogicalMesh], constraints: Sequence[Constraint], types: Mapping[str, TensorType]
) -> ConstraintError:
    """The error that names the constraint that no mesh can keep, or all that no mesh can keep together."""
    alone = [c for c in constraints if c.value in types and not any(_on(m, c.shards, types[c.value]) for m in meshes)]
    tried = ", ".join(str(m) for m in meshes[:6])
    if alone:
        c = alone[0]
        return ConstraintError(
            f"the constraint {c.text} on {c.value} {types[c.value]} cannot hold on any of the meshes {tried}",
            cause="the dim has no size that the mesh axes divide, or there are not as many devices as shards",
            remedy="another dim or number of shards, or other sizes in mesh_axes or mesh_shape",
        )
    names = "; ".join(f"{c.text} on {c.value}" for c in constraints[:4])
    return ConstraintError(
        f"no mesh keeps all {len(constraints)} constraints together: {names}; tried {tried}",
        cause="they want numbers of shards that no one logical mesh has",
        remedy="fewer constraints, or the same numbers of shards in all of them",
    )
