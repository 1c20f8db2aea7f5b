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
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.ir import Graph, Input, Layout
from autopar.plan import Plan
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
        return placement_like(traced, *planned_like(options.like))
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
        constraints.append(_constraint(i, Layout(_dims(sharding, i.type.rank)), sizes, "as it lies"))
    if len(meshes) != 1:
        return CurrentPlacement()
    (mesh,) = meshes
    return CurrentPlacement(tuple(int(n) for n in mesh.shape.values()), tuple(constraints))


def _dims(sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return tuple(() if e is None else (str(e),) if isinstance(e, str) else tuple(map(str, e)) for e in entries)


def placement_like(traced: Traced, plan: Plan, name: str) -> CurrentPlacement:
    """Where the arguments of a step lie that are those of another: as its plan wants them.

    Args:
        traced: the step.
        plan: of the other.
        name: of the other.

    Raises:
        AutoparError: the plan has several stages, or no argument is the same.
    """
    if plan.num_stages > 1:
        raise AutoparError(
            f"like={name}: its plan has {plan.num_stages} stages, on whose devices its state lies apart",
            cause="a step without a pipeline needs its state on one mesh",
            remedy="leave out like=, which moves the state at every call, or plan both with num_stages=1",
        )
    by_end = {(_behind(r.path), r.type): r for r in plan.content.inputs}
    constraints = []
    for i in traced.graph.inputs:
        record = by_end.get((_behind(i.name), str(i.type)))
        if record is not None and i.role != "batch":
            layout = Layout.parse(record.layout)
            constraints.append(_constraint(i, layout, plan.stages[0].mesh_shape, f"like {name}"))
    if not constraints:
        raise AutoparError(
            f"like={name}: no argument of {traced.graph.name} has a path and a type of its arguments",
            cause="arguments are matched by what is behind the argument's name: state.params['w'], params['w']",
            remedy=f"pass the state as {name} takes it; it has {', '.join(r.path for r in plan.content.inputs[:3])}",
        )
    return CurrentPlacement(tuple(plan.stages[0].mesh_shape.values()), tuple(constraints))


def planned_like(other: Any) -> tuple[Plan, str]:
    """The plan of what was given as ``like=``, and its name.

    Raises:
        AutoparError: it is no decorated function or plan, or was not planned yet.
    """
    if isinstance(other, Plan):
        return other, other.content.program
    plans: Callable[[], Sequence[Plan]] | None = getattr(other, "plans", None)
    if plans is None:
        raise AutoparError(
            f"like={other!r} is neither a decorated function nor a plan",
            remedy="parallelize(eval_step, like=train_step)",
        )
    plans_of_other = plans()
    name = str(getattr(other, "__name__", "like"))
    if not plans_of_other:
        raise AutoparError(
            f"like={name}: it has no plan yet", remedy=f"call {name}, or {name}.plan(...), before this function"
        )
    return plans_of_other[-1], name


def _is_kept(graph: Graph, leaf: Input) -> bool:
    return leaf.role == "parameter" and all(o.updates != leaf.name for o in graph.outputs)


def _behind(path: str) -> str:
    """A path without the name of the argument."""
    ends = [n for n in (path.find("."), path.find("[")) if n >= 0]
    return path[min(ends) :] if ends else ""


def _constraint(leaf: Input, layout: Layout, sizes: dict[str, int], text: str) -> Constraint:
    shards = []
    for axes in layout.dims:
        count = 1
        for a in axes:
            count *= sizes[a]
        shards.append(count)
    return Constraint(leaf.name, tuple(shards), text, layout.dims)
