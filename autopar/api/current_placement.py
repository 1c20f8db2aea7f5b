"""State that a step reads and does not return: it is planned for as it lies, for a move would be for one call.

An eval step or a server calls with the parameters of a train step again and again. Where they came from that step, or
where it was said that they will (`parallelize(like=...)`), the plan takes them as they lie. What the type of an
argument says (a mesh of explicit axes splits it) was asked for by the user: it is kept as a constraint, or told.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
from jax.sharding import AxisType, NamedSharding

from autopar.api.constraints import Pin
from autopar.api.options import ParallelOptions
from autopar.api.shared_state import SharedState, placed_as
from autopar.cluster import Cluster
from autopar.cluster.mesh import prime_factors
from autopar.errors import ConstraintError
from autopar.frontend import CallSignature, Traced
from autopar.frontend.attrs import shards
from autopar.ir import Graph, Input, Layout
from autopar.plan import Plan
from autopar.plan.arguments import path_matches
from autopar.search.constraints import Constraint, can_hold


@dataclass(frozen=True)
class CurrentPlacement:
    """Present layouts of inputs.

    Args:
        mesh_shape: sizes of the mesh that they lie on; None where there is none.
        constraints: that they stay as they are.
        typed: how types split inputs, as if it were given by path.
        lost: likewise what no mesh of the plan can say.
    """

    mesh_shape: tuple[int, ...] | None = None
    constraints: tuple[Constraint, ...] = ()
    typed: tuple[Pin, ...] = ()
    lost: tuple[Pin, ...] = ()

    def without_types(self) -> CurrentPlacement:
        """The same where nothing that types say is kept."""
        return replace(self, typed=(), lost=(*self.typed, *self.lost))

    def with_notes(self, plan: Plan, pins: Sequence[Pin]) -> Plan:
        """``plan`` with a note for each input that its type splits, but for those that ``pins`` say otherwise of."""
        said = [(p, "kept") for p in self.typed] + [(p, "not kept: no mesh splits it so") for p in self.lost]
        free = [(p, what) for p, what in said if not any(path_matches(other.pattern, p.pattern) for other in pins)]
        notes = (f"{p.pattern} has the split {p.text} by its type: {what}" for p, what in free)
        return replace(plan, content=msgspec.structs.replace(plan.content, notes=(*plan.content.notes, *notes)))


def planned_by_types(
    placements: MutableMapping[CallSignature, CurrentPlacement],
    signature: CallSignature,
    search: Callable[[], tuple[Traced, Plan]],
    pins: Sequence[Pin],
) -> tuple[Traced, Plan]:
    """A plan that keeps the splits in the types of explicit axes, or a free plan where no plan keeps them.

    Notes of the plan say which splits were kept.

    Args:
        placements: placements of all calls so far, by signature; a split that no plan keeps is dropped there.
        signature: signature of the call.
        search: plans the call under its placement.
        pins: constraints that the user gave by path; they hide notes about the same arguments.
    """
    try:
        form, plan = search()
    except ConstraintError:
        if not placements[signature].typed:
            raise
        placements[signature] = placements[signature].without_types()
        form, plan = search()
    return form, placements[signature].with_notes(plan, pins)


def placement_asked(traced: Traced, options: ParallelOptions, arrays: CurrentPlacement) -> CurrentPlacement:
    """Layouts that a plan of ``traced`` has to take as they are.

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
    return CurrentPlacement() if said else arrays


def array_placement(
    traced: Traced, leaves: Sequence[Any], devices: Callable[[], Sequence[Any]], options: ParallelOptions
) -> CurrentPlacement:
    """Layouts of the parameters among ``leaves`` that another plan split over all devices, and those of types.

    Args:
        traced: the step.
        leaves: arrays of the call, or their types.
        devices: all devices, in the order of the cluster.
        options: of the function.
    """
    split = [(i, s) for leaf, i in zip(leaves, traced.graph.inputs, strict=False) if (s := _split(leaf)) is not None]
    typed = _typed(split, options) if split and options.plan is None else CurrentPlacement()
    kept = [(i, s) for i, s in split if _is_kept(traced.graph, i)]
    kept = [(i, s) for i, s in kept if list(s.mesh.devices.flat) == list(devices())] if kept else []
    if len({s.mesh for _, s in kept}) != 1:
        return typed
    sizes = {str(a): int(n) for a, n in kept[0][1].mesh.shape.items()}
    constraints = (placed_as(i.name, str(Layout(_dims(s, i.type.rank))), sizes, "as it lies") for i, s in kept)
    return replace(typed, mesh_shape=tuple(sizes.values()), constraints=tuple(constraints))


def _split(leaf: Any) -> NamedSharding | None:
    """Split of an array, or of a shape with a sharding, over a mesh."""
    sharding: Any = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return sharding if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated else None


def _typed(split: Sequence[tuple[Input, NamedSharding]], options: ParallelOptions) -> CurrentPlacement:
    """Layouts of split inputs, from their types."""
    cluster = options.cluster or Cluster.local()
    sizes = options.mesh_shape or prime_factors(cluster.num_devices)
    typed: list[Pin] = []
    lost: list[Pin] = []
    for i, sharding in split:
        types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        counts = shards(sharding, i.type.rank)
        if counts is None or any(types[a] != AxisType.Explicit for axes in _dims(sharding, i.type.rank) for a in axes):
            continue
        pin = Pin(i.name, None, counts, str(sharding.spec))
        (typed if can_hold(counts, i.type, sizes) else lost).append(pin)
    return CurrentPlacement(typed=tuple(typed), lost=tuple(lost))


def _dims(sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return tuple(() if e is None else (str(e),) if isinstance(e, str) else tuple(map(str, e)) for e in entries)


def _is_kept(graph: Graph, leaf: Input) -> bool:
    return leaf.role == "parameter" and all(o.updates != leaf.name for o in graph.outputs)
