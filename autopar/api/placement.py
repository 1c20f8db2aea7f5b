"""Placement of state: new state as a plan wants it, and state that a step reads and does not return, as it lies.

`default_placement` and `placement_of` say where new arrays go: as a plan wants them, or split over all devices.

An eval step or a server calls with the parameters of a train step again and again. Where they came from that step, or
where it was said that they will (`parallelize(like=...)`), the plan takes them as they lie, for a move would be for
one call: `CurrentPlacement`. What the type of an argument says (a mesh of explicit axes splits it) was asked for by
the user: it is kept as a constraint, or reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import device_mesh
from autopar.api.constraints import Pin
from autopar.api.many_hosts import same_init
from autopar.api.mutable import new_modules, split_arguments
from autopar.api.options import ParallelOptions
from autopar.api.shared_state import SharedState, placed_as
from autopar.cluster import Cluster
from autopar.cluster.mesh import prime_factors
from autopar.errors import ConstraintError
from autopar.frontend import CallSignature, SignatureOptions, Traced, flatten_call
from autopar.frontend.attrs import shards
from autopar.frontend.build import tensor_type
from autopar.frontend.signature import NUMBERS
from autopar.ir import Graph, Input, Layout
from autopar.lower.hosted import sharding_of
from autopar.lower.program import stage_devices
from autopar.plan import Plan
from autopar.plan.arguments import path_matches
from autopar.runtime.loaded import LoadedProgram
from autopar.search.constraints import Constraint, can_hold


@dataclass(frozen=True, eq=False)
class _MadeModule:
    """A function that makes state, as one of flat arrays.

    Args:
        flat: arrays of ``leaves`` -> the arrays of its result.
        leaves: its traced arguments.
        shapes: of the arrays of its result.
        with_paths: all leaves of its result with their paths.
        treedef: its structure.
    """

    flat: Callable[..., list[Any]]
    leaves: Sequence[Any]
    shapes: Sequence[Any]
    with_paths: Sequence[tuple[Any, Any]]
    treedef: Any

    @property
    def paths(self) -> list[str]:
        """Path in the result of each leaf that is an array, as ``.layers[0].kernel``."""
        return [jax.tree_util.keystr(path[1:]) for path, leaf in self.with_paths if _is_array(leaf)]

    def result(self, arrays: Sequence[Any]) -> Any:
        """The results of the function, with these arrays."""
        left = iter(arrays)
        result = jax.tree.unflatten(
            self.treedef, [next(left) if _is_array(leaf) else leaf for _, leaf in self.with_paths]
        )
        (module,) = new_modules(result)
        return module


def _flattened(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _MadeModule:
    options = SignatureOptions()
    signature, leaves = flatten_call(fn, args, kwargs, options)
    seen: list[tuple[list[tuple[Any, Any]], Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        inner_args, inner_kwargs = signature.arguments(arrays)
        result, _, _ = split_arguments((fn(*inner_args, **inner_kwargs),), {})
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(result)
        seen.append((with_paths, treedef))
        return [leaf for _, leaf in with_paths if _is_array(leaf)]

    try:
        shapes = jax.eval_shape(flat, *signature.avals())
    except Exception:
        if not any(isinstance(leaf, NUMBERS) for leaf in leaves):
            raise
        signature, leaves = flatten_call(fn, args, kwargs, replace(options, static_numbers=True))
        shapes = jax.eval_shape(flat, *signature.avals())
    with_paths, treedef = seen[-1]
    return _MadeModule(flat, leaves, shapes, with_paths, treedef)


def run_sharded(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], plans: Sequence[Plan],
    devices: Sequence[Any],
) -> Any:  # fmt: skip
    """The result of ``fn``, each array of it made where it is to lie.

    Args:
        fn: makes an argument of a planned function. Leaves of its result that are no arrays are kept.
        args: its arguments; Python numbers are values of the program where tracing them fails.
        kwargs: likewise.
        plans: plans whose placement is to be used, if one of their arguments has the same leaves.
        devices: all devices.
    """
    flattened = _flattened(fn, args, kwargs)
    shardings = next(
        (s for p in plans if (s := placement_of(p, flattened.paths, flattened.shapes, devices)) is not None), None
    )
    shardings = shardings or default_placement(flattened.shapes, devices)
    same_init(getattr(fn, "__name__", "a function"), flattened.leaves, flattened.paths, flattened.shapes, shardings)
    return flattened.result(_made(flattened.flat, flattened.leaves, shardings))


def run_on_workers(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
    programs: Sequence[tuple[Plan, LoadedProgram]],
) -> Any:  # fmt: skip
    """The result of ``fn``, each array of it made on the workers that read it; in this process if none does.

    Args:
        fn: makes an argument of a planned function; leaves of its result that are no arrays are kept.
        args: likewise.
        kwargs: likewise.
        programs: plans with their workers; the first of which an argument has the same leaves is used.
    """
    flattened = _flattened(fn, args, kwargs)
    for plan, program in programs:
        first = _window(plan, flattened.paths, flattened.shapes)
        if first is not None:
            return flattened.result(
                program.make(flattened.flat, flattened.leaves, range(first, first + len(flattened.shapes)))
            )
    return flattened.result(jax.jit(flattened.flat)(*flattened.leaves))


def _made(flat: Callable[..., list[Any]], leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Results of ``flat``, each where it is to lie: one program for each mesh, which makes what lies there."""
    by_number: dict[int, Any] = {}
    for mesh in dict.fromkeys(s.mesh for s in shardings):
        here = [i for i, s in enumerate(shardings) if s.mesh == mesh]

        if not mesh.local_devices:  # of stages of other processes
            shapes = jax.eval_shape(flat, *leaves)
            by_number.update((i, _elsewhere(shapes[i], shardings[i])) for i in here)
            continue

        def some(*arrays: Any, here: list[int] = here) -> list[Any]:
            results = flat(*arrays)
            return [results[i] for i in here]

        some_arrays = jax.jit(some, out_shardings=[shardings[i] for i in here])(*leaves)
        by_number.update(zip(here, some_arrays, strict=True))
    return [by_number[i] for i in range(len(shardings))]


def _elsewhere(shape: Any, sharding: NamedSharding) -> Any:
    """An array of which this process has nothing."""
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, [], dtype=shape.dtype)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def placement_of(
    plan: Plan, paths: Sequence[str], shapes: Sequence[Any], devices: Sequence[Any]
) -> list[NamedSharding] | None:
    """Shardings of arrays if some argument of ``plan`` has the same leaves; else None."""
    first = _window(plan, paths, shapes)
    if first is None:
        return None
    meshes = [stage_devices(plan, s, devices) for s in range(plan.num_stages)]
    window = plan.content.inputs[first : first + len(shapes)]
    return [sharding_of(r, meshes[r.stage], host=r.memory == "host") for r in window]


def _window(plan: Plan, paths: Sequence[str], shapes: Sequence[Any]) -> int | None:
    """Index of the first input of ``plan`` from which on inputs have these paths and types."""
    wanted = [(path, str(tensor_type(leaf))) for path, leaf in zip(paths, shapes, strict=True)]
    records = plan.content.inputs
    for start in range(len(records) - len(wanted) + 1):
        window = records[start : start + len(wanted)]
        if all(r.type == t and r.path.endswith(p) for r, (p, t) in zip(window, wanted, strict=True)):
            return start
    return None


def default_placement(shapes: Sequence[Any], devices: Sequence[Any]) -> list[NamedSharding]:
    """Every array split over as many devices as its dims allow."""
    factors = prime_factors(len(devices)) or [1]
    mesh = device_mesh([(f"d{i}", n) for i, n in enumerate(factors)], devices)
    return [NamedSharding(mesh, _split(leaf.shape, mesh)) for leaf in shapes]


def _split(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Gives each axis of the mesh to the dim with the largest pieces that it divides."""
    left = list(shape)
    axes: list[list[str]] = [[] for _ in shape]
    for name, n in mesh.shape.items():
        fitting = [d for d in range(len(left)) if left[d] and left[d] % n == 0]
        if fitting:
            dim = max(fitting, key=lambda d: left[d])
            left[dim] //= n
            axes[dim].append(name)
    return PartitionSpec(*(tuple(a) or None for a in axes))


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
        """``plan`` with a note for each input whose explicit type splits it, unless one of ``pins`` names it."""
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


def requested_placement(traced: Traced, options: ParallelOptions, arrays: CurrentPlacement) -> CurrentPlacement:
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
    split = [(i, s) for leaf, i in zip(leaves, traced.graph.inputs, strict=False) if (s := _split_of(leaf)) is not None]
    typed = _typed(split, options) if split and options.plan is None else CurrentPlacement()
    kept = [(i, s) for i, s in split if _is_kept(traced.graph, i)]
    kept = [(i, s) for i, s in kept if list(s.mesh.devices.flat) == list(devices())] if kept else []
    if len({s.mesh for _, s in kept}) != 1:
        return typed
    sizes = {str(a): int(n) for a, n in kept[0][1].mesh.shape.items()}
    constraints = (placed_as(i.name, str(Layout(_dims(s, i.type.rank))), sizes, "as it lies") for i, s in kept)
    return replace(typed, mesh_shape=tuple(sizes.values()), constraints=tuple(constraints))


def _split_of(leaf: Any) -> NamedSharding | None:
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
