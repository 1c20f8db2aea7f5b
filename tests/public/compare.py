"""Runs a case decorated and plain, and says how far apart the results are."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import difference, host
from tests.public.case import Arguments, Case, Step

STEPS = 2
DOUBLE_RTOL = 1e-9
SINGLE_FLOOR = 1e-6  # where splitting by hand changes next to nothing
MEANINGLESS = 0.1  # a leaf that is zero but for rounding would allow anything
CLUSTER = toy(bandwidth=1e12, flops=1e7)


@dataclass(frozen=True)
class Outcome:
    """What comparing a case showed.

    Args:
        apart: largest difference of a leaf, relative to its norm.
        allowed: how large it may be.
        where: path of that leaf.
        split: operators that the plan splits, of all.
        notes: those of the plan: operators without a rule, sizes that nothing divides.
    """

    apart: float
    allowed: float
    where: str
    split: tuple[int, int]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the results agree."""
        return self.apart <= self.allowed


@contextlib.contextmanager
def settings(case: Case) -> Iterator[None]:
    """64-bit types as the case has them; warnings of other people's code are theirs."""
    with warnings.catch_warnings(), jax.enable_x64(not case.single):
        warnings.simplefilter("ignore")
        yield


def widened(tree: Any) -> Any:
    """A copy of a pytree with float64 for float32 and complex128 for complex64."""
    wide = {"float32": jnp.float64, "complex64": jnp.complex128}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.copy(leaf)
        return jnp.array(leaf, wide.get(str(leaf.dtype), leaf.dtype), copy=True)

    return jax.tree.map(copy, tree)


def copied(tree: Any) -> Any:
    """A copy of a pytree, so that a step that changes its argument leaves the original."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def trajectory(case: Case, step: Step, args: Arguments) -> list[Any]:
    """Results of `STEPS` calls, each with the state that the last one gave."""
    results = []
    for _ in range(STEPS):
        result = step(*args)
        if case.mutates:
            results.append((copied(args[0]), result))
        else:
            results.append(result)
            args = (result[0], *args[1:])
    return results


def plain_jit(case: Case, step: Step) -> Step:
    """The step as its authors would run it on one device."""
    module, name = case.jit.rsplit(".", 1)
    jitted: Step = getattr(import_module(module), name)(step)
    return jitted


def by_hand(case: Case, args: Arguments) -> Arguments:
    """The arguments with the batch split over eight devices and all else on each of them."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))

    def place(leaf: Any, split: bool) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        split = split and leaf.ndim > 0 and leaf.shape[0] % 8 == 0
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data") if split else PartitionSpec()))

    return tuple(jax.tree.map(lambda x, i=i: place(x, i in case.batch), a) for i, a in enumerate(args))


def apart(got: Any, want: Any) -> list[tuple[float, str]]:
    """Of every array leaf the difference, relative to the norm of the leaf of ``want``, and the path."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    assert got_tree == want_tree, f"structure {got_tree} instead of {want_tree}"
    found = [(0.0, "")]
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(w, jax.Array):
            assert isinstance(g, jax.Array), f"{where} is {type(g)}"
            found.append((difference(host(g), host(w)), where))
        else:
            assert g is w or bool(np.all(g == w)), f"{where}: {g} instead of {w}"
    return found


def outcome(case: Case, mesh_shape: tuple[int, ...]) -> Outcome:
    """Runs a case on a mesh of eight devices and on one.

    Args:
        case: the case.
        mesh_shape: sizes of the mesh axes.
    """
    with settings(case):
        step, args = case.build()
        if not case.single:
            args = widened(args)
        want = trajectory(case, plain_jit(case, step), copied(args))
        allowed = DOUBLE_RTOL
        if case.single:
            hand = trajectory(case, plain_jit(case, step), by_hand(case, copied(args)))
            allowed = max(SINGLE_FLOOR, 10 * max(apart(hand, want))[0])
            assert allowed < MEANINGLESS, f"splitting by hand alone changes results by {allowed / 10:.1e}"
        parallel = autopar.parallelize(step, cluster=CLUSTER, mesh_shape=mesh_shape, **dict(case.options))
        got = trajectory(case, parallel, copied(args))
        worst, where = max(apart(got, want))
        plan = parallel.plan(*copied(args))
    operators = plan.content.operators
    split = sum(any(not _is_whole(text) for text in r.results) for r in operators)
    return Outcome(worst, allowed, where, (split, len(operators)), plan.content.notes)


def _is_whole(layout: str) -> bool:
    return autopar.ir.Layout.parse(layout).is_replicated
