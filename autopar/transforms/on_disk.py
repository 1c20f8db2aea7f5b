"""`on_disk`: an optimizer whose moments lie in memory-mapped files, for what devices and hosts cannot hold.

    for each parameter, one after the other:  m = file(v mod 2);  u, m' = U(g, m, w);  file((v + 1) mod 2) = m'

The state is the counter v. Moments of one parameter are in memory at a time: its read waits for the write before it,
since the counter that it takes is what that write returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as JaxLiteral

from autopar.errors import AutoparError, CheckpointError
from autopar.transforms import moment_files
from autopar.transforms.moment_files import FileLayout, file_layout
from autopar.transforms.optimizers import Transformation
from autopar.transforms.state import leaf_paths

_COUNTER = jax.ShapeDtypeStruct((), np.dtype(np.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OnDiskState:
    """Numbers of the valid files.

    Args:
        version: steps that were made; files of ``version % 2`` have their moments: int32.
    """

    version: Any


def on_disk(optimizer: Any, directory: str | os.PathLike[str]) -> Transformation:
    """An optimizer of optax with its moments in files, which computes what it computed without; see docs/transforms.md.

    Args:
        optimizer: ``init(params)`` and ``update(gradients, state, params)``, as of `optax.adamw`.
        directory: of the files, of one optimizer alone; made with mode 0700 by ``init`` if it is not there.

    Returns:
        Its ``init(params)`` writes the first moments, its ``update(gradients, state, params)`` needs the parameters.
        The state is an `OnDiskState`. A step that fails leaves the files of its state as they were, so does one that
        is repeated. An error inside of a compiled step has jax's type, with the text of the `CheckpointError`.

    Raises:
        AutoparError: when called: the folder is another user's, or a link; the optimizer mixes parameters (a global
            norm) or draws random numbers; there is more than one process.
        ClusterError: when planned: workers on Ray would run it.
        CheckpointError: when called: files do not fit the parameters; ``init`` would write over those of a later step.
    """
    folder = Path(os.path.abspath(directory))

    def init(params: Any) -> OnDiskState:
        _check_processes()
        check_leafwise(optimizer.init, optimizer.update, params)
        version: Any = jnp.zeros((), jnp.int32)
        later = _is_traced(params)
        if not later:
            moment_files.checked_folder(folder)
        for i, layout in enumerate(_layouts(optimizer, params)):
            leaves = jax.tree.leaves(optimizer.init(alone(params, i)))
            call = partial(_begin, folder, i, layout)
            version = io_callback(call, _COUNTER, version, *leaves) if later else call(version, *leaves)
        return OnDiskState(jnp.asarray(version))

    def update(gradients: Any, state: OnDiskState, params: Any = None, **extra: Any) -> tuple[Any, OnDiskState]:
        _check_processes()
        if params is None:
            raise AutoparError("on_disk: update has no parameters", remedy="optimizer.update(gradients, state, params)")
        check_leafwise(optimizer.init, partial(optimizer.update, **extra), params)
        later = _is_traced(gradients, state, params)
        treedef = jax.tree.structure(gradients)
        version, updates = state.version, []
        if folder.exists():
            moment_files.checked_folder(folder)
        for i, layout in enumerate(_layouts(optimizer, params)):
            structure = jax.tree.structure(jax.eval_shape(optimizer.init, alone(_shapes(params), i)))
            moments = _read(folder, i, layout, version, later)
            update_of, kept = optimizer.update(
                alone(gradients, i), jax.tree.unflatten(structure, moments), alone(params, i), **extra
            )
            updates += jax.tree.leaves(update_of)
            call = partial(_write, folder, i, layout)
            leaves = jax.tree.leaves(kept)
            version = io_callback(call, _COUNTER, version, *leaves) if later else call(version, *leaves)
        return jax.tree.unflatten(treedef, updates), OnDiskState(jnp.asarray(version) + 1)

    return Transformation(init, update)


def check_on_disk(state: OnDiskState, directory: str | os.PathLike[str]) -> None:
    """Whether a state that was restored has its files, before a step is run.

    Args:
        state: with a counter that is computed.
        directory: of the files.

    Raises:
        CheckpointError: files are of other steps; the message names both.
        AutoparError: the folder is another user's, or a link.
    """
    folder, version = Path(os.path.abspath(directory)), int(state.version)
    held = moment_files.versions(moment_files.checked_folder(folder)) if folder.exists() else {}
    wrong = {number: there for number, there in held.items() if version not in there}
    if wrong or not held:
        number, there = next(iter(wrong.items()), ("no parameter", []))
        raise CheckpointError(
            f"the state is of step {version}, {folder} has of {number} moments of steps {there}",
            cause="the state is of another checkpoint than the files",
            remedy="copy the folder with each checkpoint, and copy it back with that",
        )


def _begin(folder: Path, number: int, layout: FileLayout, version: Any, *arrays: Any) -> Any:
    moment_files.begin(moment_files.checked_folder(folder), number, layout, arrays)
    return np.int32(version)


def _write(folder: Path, number: int, layout: FileLayout, version: Any, *arrays: Any) -> Any:
    moment_files.write(folder, number, layout, int(version) + 1, arrays)
    return np.int32(version)


def _read(folder: Path, number: int, layout: FileLayout, version: Any, later: bool) -> Sequence[Any]:
    """Moments of a parameter, in a program that runs ``later`` or now."""
    shapes = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in layout.places)
    if not later:
        return [jnp.array(a, copy=True) for a in moment_files.read(folder, number, layout, int(version))]
    moment_files.check_layout(folder, number, layout)
    arrays: Sequence[Any] = io_callback(partial(_load, folder, number, layout), shapes, version) if shapes else ()
    return arrays


def _load(folder: Path, number: int, layout: FileLayout, version: Any) -> Sequence[Any]:
    return moment_files.read(folder, number, layout, int(version))


def _layouts(optimizer: Any, params: Any) -> list[FileLayout]:
    """Layouts of the files of each parameter."""
    shapes = _shapes(params)
    layouts = []
    for i, name in enumerate(leaf_paths(shapes)):
        state = jax.eval_shape(optimizer.init, alone(shapes, i))
        leaves = jax.tree.leaves(state)
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
            raise AutoparError(
                f"on_disk: the state of {name} has a random key", remedy="draw random numbers outside of the optimizer"
            )
        layouts.append(file_layout(name, leaf_paths(state), leaves))
    return layouts


def _shapes(params: Any) -> Any:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)


def _is_traced(*trees: Any) -> bool:
    """Whether what is computed here runs later, in a program."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in (jnp.zeros(()), *jax.tree.leaves(trees)))


def _check_processes() -> None:
    if jax.process_count() > 1:
        raise AutoparError(
            f"on_disk: {jax.process_count()} processes, and files of moments belong to one",
            remedy='offload="auto" splits moments over the hosts of all processes',
        )


_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_RANDOM = ("random_", "threefry2x32", "rng_")

#: A set of parameters as the bits of a number.
Leaves: TypeAlias = int


def alone(tree: Any, number: int) -> Any:
    """``tree`` with the leaf of that number, and nothing in place of the others."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf if i == number else () for i, leaf in enumerate(leaves)])


def check_leafwise(init: Callable[[Any], Any], update: Callable[..., Any], params: Any) -> None:
    """Refuses an optimizer that mixes parameters.

    Args:
        init: of the optimizer.
        update: of the optimizer.
        params: parameters, or their shapes.

    Raises:
        AutoparError: an update reads what belongs to another parameter, or draws random numbers; it has the paths.
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    names = leaf_paths(shapes)
    whole = jax.eval_shape(init, shapes)
    places: dict[str, Leaves] = {}
    for i in range(len(names)):
        for path in leaf_paths(jax.eval_shape(init, alone(shapes, i))):
            places[path] = places.get(path, 0) | 1 << i
    each = [1 << i for i in range(len(names))]
    owners = [_owner(places.get(path, 0)) for path in leaf_paths(whole)] if len(names) > 1 else [1] * len(places)
    closed, _ = jax.make_jaxpr(update, return_shape=True)(shapes, whole, shapes)
    if any(_draws(closed.jaxpr)):
        raise AutoparError(
            "on_disk: the optimizer draws random numbers for all parameters together",
            cause="noise is added inside of it",
            remedy="add noise outside: optax.chain(optax.add_noise(...), on_disk(...))",
        )
    results = _reached(closed.jaxpr, [*each, *owners, *each])
    allowed = [*each, *owners]
    if len(results) != len(allowed):
        raise AutoparError(f"on_disk: {len(each)} gradients and {len(owners)} leaves of state make {len(results)}")
    for path, got, may in zip([*names, *leaf_paths(whole)], results, allowed, strict=True):
        if got & ~may:
            read = [name for i, name in enumerate(names) if got & ~may & 1 << i]
            raise AutoparError(
                f"on_disk: the optimizer mixes parameters: what it makes of {path} depends on {', '.join(read[:3])}",
                cause="a norm over all gradients, as clipping needs it, is inside of it",
                remedy="put it outside: optax.chain(optax.clip_by_global_norm(...), on_disk(...))",
            )


def _owner(leaves: Leaves) -> Leaves:
    """The one leaf that has a piece of state; none where several share it."""
    return leaves if leaves.bit_count() == 1 else 0


def _reached(jaxpr: Jaxpr, operands: Sequence[Leaves]) -> list[Leaves]:
    """The leaves that each result depends on; calls and branches are followed inside, loops are as one operator."""
    env: dict[Any, Leaves] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        given = [0 if isinstance(v, JaxLiteral) else env.get(v, 0) for v in eqn.invars]
        bodies = [b for b in _bodies(eqn) if eqn.primitive.name in _CALLS and len(b.invars) == len(given)]
        if eqn.primitive.name == "cond":
            predicate, *rest = given
            branches = [_reached(b, rest) for b in _bodies(eqn)]
            results = [predicate | _union(way) for way in zip(*branches, strict=True)]
        elif bodies:
            results = _reached(bodies[0], given)
        else:
            results = [_union(given)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [0 if isinstance(v, JaxLiteral) else env.get(v, 0) for v in jaxpr.outvars]


def _union(sets: Sequence[Leaves]) -> Leaves:
    union = 0
    for leaves in sets:
        union |= leaves
    return union


def _draws(jaxpr: Jaxpr) -> Sequence[bool]:
    """Whether each equation, in bodies too, makes random numbers or keys."""
    return [e.primitive.name.startswith(_RANDOM) or any(any(_draws(b)) for b in _bodies(e)) for e in jaxpr.eqns]


def _bodies(eqn: Any) -> list[Jaxpr]:
    values = [b for v in eqn.params.values() for b in (v if isinstance(v, tuple | list) else (v,))]
    jaxprs = [b.jaxpr if isinstance(b, ClosedJaxpr) else b for b in values]
    return [b for b in jaxprs if isinstance(b, Jaxpr)]
