"""`step.save` and `step.restore`: checkpoints in Orbax's format, laid out by the plan that is to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._compat.devices import world_devices
from autopar._compat.world import world
from autopar.api.placement import default_placement, placement_of
from autopar.api.without_flush import PipelineState
from autopar.errors import CheckpointError
from autopar.errors.base import optional_module
from autopar.frontend import Traced
from autopar.plan import Plan
from autopar.runtime.hosts.agree import Agreement

#: What Orbax writes.
_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float)


class Saving:
    """The checkpoints that one function writes, by folder."""

    def __init__(self) -> None:
        self._savers: dict[str, Any] = {}

    def save(self, path: str, state: Any, at: int | None, keep: int | None, wait: bool) -> int:
        """Writes a checkpoint in Orbax's format; returns its number as soon as the arrays may be used again.

        Args:
            path: folder of all checkpoints.
            state: tree of arrays.
            at: number of the checkpoint; None for one more than the last.
            keep: number of the newest checkpoints that are not deleted; None for all.
            wait: whether to return only when it is on disk.
        """
        files = _files()
        wrong = [
            p
            for p, leaf in _with_names(state)
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float)
        ]
        if wrong:
            raise CheckpointError(
                f"{wrong[0]} is not an array of this process",
                cause="it is on Ray workers, or is not an array",
                remedy="autopar.Checkpoints saves arrays on Ray workers; leave out other leaves",
            )
        processes = world()
        if processes is not None:
            facts = [("checkpoint", f"{at} in {path}, of which {keep} are kept")]
            facts += [(f"array {p}", str(np.shape(leaf))) for p, leaf in _with_names(state)]
            Agreement.next(processes, "save").compare(facts)
        saver = self._savers.get(path)
        if saver is None or saver.keep != keep:
            if saver is not None:
                saver.close()
            saver = self._savers[path] = files.Saver(path, keep)
        number: int = saver.save(state, at)
        if wait:
            saver.wait()
        return number

    def wait(self) -> None:
        """Returns when all that was saved is on disk."""
        for saver in self._savers.values():
            saver.wait()


def restore(
    path: str,
    like: Any,
    at: int | None,
    planned: Sequence[tuple[Traced, Plan]],
    plans: Sequence[Plan],
    carries: bool = False,
) -> Any:
    """A state out of a checkpoint of `save`, Orbax or Flax, placed as a plan wants it.

    Args:
        path: folder of checkpoints.
            like: tree of arrays, or their shapes, of the state's structure; None for that of the arguments that were
            planned.
        at: number of the checkpoint; None for the newest.
        planned: traced steps with their plans.
        plans: other plans whose placement may be taken, as loaded ones.
            carries: whether the step has a schedule without a flush, so that checkpoints hold values of passes under
            way too.
    """
    files = _files()
    folder = files.folder_of(path, at)
    there = files.shapes_of(folder)
    names = [n for n, _ in _with_names(there)]
    processes = world()
    if processes is not None:
        Agreement.next(processes, "restore").compare(
            [("checkpoint", folder.name if folder.name.isdigit() else folder.parent.name), ("arrays", ", ".join(names))]
        )
    wanted = _structure(folder, there, like, [traced for traced, _ in planned], carries)
    leaves, treedef = jax.tree.flatten(wanted)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(wanted)[0]]
    devices = world_devices()
    all_plans = [*(p for _, p in planned), *plans]
    shardings = next((s for p in all_plans if (s := placement_of(p, paths, leaves, devices)) is not None), None)
    shardings = shardings or default_placement(leaves, devices)
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=k) for s, k in zip(leaves, shardings, strict=True)]
    return files.restored(folder, jax.tree.unflatten(treedef, placed))


def _structure(folder: Path, there: Any, like: Any, traced: Sequence[Traced], carries: bool) -> Any:
    """The shapes of a checkpoint in the structure wanted: that of ``like``, or of an argument with these leaves."""
    if like is None and carries and _is_under_way(there):
        state = _structure(folder, there["state"], None, traced, False)
        return PipelineState(state, there.get("under_way", {}), there["calls"])
    names = [n for n, _ in _with_names(there)]
    if like is not None:
        wanted = jax.tree.map(_shape, like)
        mismatch = differences([n for n, _ in _with_names(wanted)], names) or _other_shape(wanted, there)
        if mismatch:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another structure: {mismatch}",
                remedy="give a state of its structure as like=, or leave it out",
            )
        return wanted
    for t in traced:
        args, kwargs = t.signature.arguments(t.signature.avals())
        for argument in (*args, *kwargs.values()):
            if {n for n, _ in _with_names(argument)} == set(names):
                return jax.tree.map(_shape, argument)
    return there


def _is_under_way(there: Any) -> bool:
    """Whether a checkpoint has the fields of a `PipelineState`."""
    fields = {f.name for f in dataclasses.fields(PipelineState)}
    return isinstance(there, dict) and {"state", "calls"} <= set(there) <= fields


def differences(wanted: Sequence[str], there: Sequence[str]) -> str:
    """Paths that only one of two lists has, as text; "" where both have the same."""
    missing, more = sorted(set(wanted) - set(there)), sorted(set(there) - set(wanted))
    parts = [f"it has no {', '.join(missing[:3])}"] if missing else []
    return "; ".join([*parts, *([f"it has {', '.join(more[:3])}"] if more else [])])


def _other_shape(wanted: Any, there: Any) -> str:
    """The first array that has another shape in a checkpoint, as text; "" where none has. Of keys data are written."""
    shapes = dict(_with_names(there))
    for name, leaf in _with_names(wanted):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if not key and leaf.shape != shapes[name].shape:
            return f"{name} has shape {shapes[name].shape} there and {leaf.shape} here"
    return ""


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _with_names(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their paths in the form that Orbax has: keys, fields and numbers in one form."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in named]


def _files() -> Any:
    """The module that imports Orbax. CheckpointError where Orbax is not installed."""
    missing = CheckpointError(
        "orbax-checkpoint cannot be imported",
        cause="it is not installed",
        remedy="pip install 'autopar[checkpoint]'",
    )
    return optional_module("autopar.runtime.hosts.orbax_checkpoints", "orbax", missing)
