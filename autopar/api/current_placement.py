"""State that a step reads and does not return: it is planned for as it lies, for a move would be for one call.

An eval step or a server calls with the parameters of a train step again and again. Where they came from that step, or
where it was said that they will (`parallelize(like=...)`), the plan takes them as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.api.options import ParallelOptions
from autopar.api.shared_state import SharedState, placed_as
from autopar.frontend import Traced
from autopar.ir import Graph, Input, Layout
from autopar.search.constraints import Constraint


@dataclass(frozen=True)
class CurrentPlacement:
    """Where inputs lie already.

    Args:
        mesh_shape: sizes of the mesh that they lie on; None where there is none.
        constraints: that they stay as they are.
    """

    mesh_shape: tuple[int, ...] | None = None
    constraints: tuple[Constraint, ...] = ()


def placement_asked(traced: Traced, options: ParallelOptions, arrays: CurrentPlacement | None) -> CurrentPlacement:
    """What a plan of ``traced`` takes as it lies.

    Args:
        traced: the step.
        options: of its function; what it says of the mesh or by path comes before where arrays happen to lie.
        arrays: where the arrays of the first call lie.
    """
    if options.like is not None:
        shared = SharedState.of(options.like)
        if shared.is_pipeline:
            return CurrentPlacement()  # `TracedStep.layered` takes it stage by stage
        return CurrentPlacement(tuple(shared.plan.stages[0].mesh_shape.values()), shared.constraints(traced))
    said = options.plan is not None or options.mesh_shape is not None or bool(options.constraints)
    return CurrentPlacement() if arrays is None or said else arrays


def array_placement(traced: Traced, leaves: Sequence[Any], devices: Callable[[], Sequence[Any]]) -> CurrentPlacement:
    """Where the parameters among ``leaves`` lie, if they were split by another plan over all devices.

    Args:
        traced: the step.
        leaves: arrays of the call.
        devices: all devices, in the order of the cluster.
    """
    meshes: set[Any] = set()
    constraints = []
    for leaf, i in zip(leaves, traced.graph.inputs, strict=False):
        sharding: Any = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated or not _is_kept(traced.graph, i):
            continue
        if list(sharding.mesh.devices.flat) != list(devices()):
            continue
        meshes.add(sharding.mesh)
        sizes = {str(a): int(n) for a, n in sharding.mesh.shape.items()}
        constraints.append(placed_as(i.name, str(Layout(_dims(sharding, i.type.rank))), sizes, "as it lies"))
    if len(meshes) != 1:
        return CurrentPlacement()
    (mesh,) = meshes
    return CurrentPlacement(tuple(int(n) for n in mesh.shape.values()), tuple(constraints))


def _dims(sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return tuple(() if e is None else (str(e),) if isinstance(e, str) else tuple(map(str, e)) for e in entries)


def _is_kept(graph: Graph, leaf: Input) -> bool:
    return leaf.role == "parameter" and all(o.updates != leaf.name for o in graph.outputs)
