"""Runs a function decorated and plain, and compares every leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import ParallelFunction


def host(leaf: Any) -> Any:
    """A leaf as a numpy array, keys as the numbers that they are; other objects as they are."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)
    return leaf


def difference(got: Any, want: Any) -> float:
    """Norm of the difference over norm of ``want``; inf where one is finite and the other is not."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if not np.issubdtype(want.dtype, np.number) and want.dtype != jnp.bfloat16:
        return 0.0 if np.array_equal(got, want) else np.inf
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return np.inf
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return np.inf
    norm = float(np.linalg.norm(want[finite]))
    apart = float(np.linalg.norm((got - want)[finite]))
    if wide == np.float64 and max(norm, apart) < 1e-15:
        return 0.0  # nothing but rounding noise, as Adam's moments of the bias of an attention key
    return apart / norm if norm else apart


def assert_trees_same(got: Any, want: Any, rtol: float = 1e-5) -> None:
    """Same structure; same leaves within ``rtol`` by norm; other objects equal."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    assert got_tree == want_tree
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(w, jax.Array | np.ndarray):
            assert isinstance(g, jax.Array), f"{where} is {type(g)}"
            apart = difference(host(g), host(w))
            assert apart <= rtol, f"{where} differs by {apart:.1e} of its norm"
        elif isinstance(w, bool | int | float | complex) and isinstance(g, jax.Array):
            assert g.item() == w, where
        else:
            assert g is w or g == w, where


def one_device(tree: Any) -> Any:
    """A copy of a pytree's arrays on the first device."""

    def copy(leaf: Any) -> Any:
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(copy, tree)


def assert_same(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    steps: int = 1,
    rtol: float = 1e-5,
    loss_rtol: float | None = None,
    **options: Any,
) -> ParallelFunction:
    """Asserts that ``fn`` decorated returns what it returns plain; gives the decorated function.

    Args:
        fn: with several steps it takes ``(state, batch)`` and returns ``(state, metrics)``.
        args: its arguments.
        steps: how often it is called, each time with the state that came back.
        rtol: relative to the norm of each leaf.
        loss_rtol: if given, only metrics are compared, each relative to its size.
        options: of `autopar.parallelize`. Where neither stages, a strategy nor a plan is asked for, one stage is: what
            is compared are values, and tests of the search look for stages.
    """
    if not options.keys() & {"num_stages", "search", "plan"}:
        options["num_stages"] = 1
    parallel = autopar.parallelize(fn, **options)
    plain = jax.jit(fn)
    ours, theirs = one_device(tuple(args)), one_device(tuple(args))
    for step in range(steps):
        got, want = parallel(*ours), plain(*theirs)
        if loss_rtol is None:
            if step in (0, steps - 1):
                assert_trees_same(got, want, rtol)
        else:
            assert_trees_same(got[1], want[1], loss_rtol)
        if step < steps - 1:
            ours, theirs = (got[0], *ours[1:]), (want[0], *theirs[1:])
    return parallel
