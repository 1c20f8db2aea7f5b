"""Placement of new state: as a plan wants it, or split over all devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.api.many_hosts import same_init
from autopar.api.modules import new_modules, split_arguments
from autopar.cluster.mesh import prime_factors
from autopar.frontend import SignatureOptions, flatten_call
from autopar.frontend.build import tensor_type
from autopar.frontend.signature import NUMBERS
from autopar.lower.hosted import sharding_of
from autopar.lower.program import stage_devices
from autopar.plan import Plan
from autopar.runtime.loaded import LoadedProgram


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
        fn: see `run_sharded`.
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
    names = tuple(f"d{i}" for i in range(len(factors)))
    mesh = Mesh(np.array(devices, dtype=object).reshape(factors), names, axis_types=(AxisType.Auto,) * len(factors))
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
