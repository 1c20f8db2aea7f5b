"""Collectives next to a loop or a branch that has collectives inside: one or the other comes first, on all devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.barriers import after
from autopar.lower.program import lower
from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.random_plans import random_plan

COLLECTIVES = {"psum", "psum2", "all_gather", "all_to_all", "ppermute", "reduce_scatter", "psum_invariant", "pmax"}
REGIONS = {"cond", "while", "scan"}


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, np.inf, -0.0]), np.float32(3), np.arange(4, dtype=np.int8), np.array([True, False]),
        np.array([1 + 2j]), np.arange(3, dtype=np.float16), np.zeros((0, 2)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("other", [np.float64(np.nan), np.float32(1), np.int8(-1), np.uint32(2**32 - 1)], ids=repr)
def test_what_waits_is_unchanged(array, other, x64) -> None:
    got = jax.jit(lambda a, b: after(a, [b, b]))(array, other)
    assert got.dtype == array.dtype
    assert np.asarray(got).tobytes() == np.asarray(array).tobytes()


def branch(x, w):
    y = lax.cond(w.sum() > 0, lambda: jnp.tanh(x @ w) @ w.T, lambda: jnp.sin(x) + jnp.sort(x, axis=0))
    return y, jnp.sort(w, axis=0).T @ x.T, jnp.cumsum(x, axis=1)


def loops(x, w):
    y = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) @ w.T, x)
    z, _ = lax.scan(lambda h, r: (jnp.tanh(h @ w @ w.T) + r, None), x, jnp.stack([x, x]))
    return y, z, jnp.sort(w, axis=0).T @ x.T


def unordered(jaxpr) -> tuple[int, int]:
    """(pairs of a region with collectives and a collective next to it, those that do not depend on each other)."""
    reaches: dict[object, set[int]] = {}  # variable -> numbers of the equations that it depends on
    above: list[set[int]] = []
    for n, e in enumerate(jaxpr.eqns):
        above.append(
            {n}.union(*(reaches.get(v, set()) for v in e.invars if not isinstance(v, jax.extend.core.Literal)))
        )
        reaches.update((v, above[n]) for v in e.outvars)
    sends = [n for n, e in enumerate(jaxpr.eqns) if e.primitive.name in COLLECTIVES]
    regions = [n for n, e in enumerate(jaxpr.eqns) if e.primitive.name in REGIONS and inside(e)]
    pairs = [(r, c) for r in regions for c in (*sends, *regions) if r != c]
    return len(pairs), sum(c not in above[r] and r not in above[c] for r, c in pairs)


def on_device(jaxpr):
    """The program of one device."""
    for e in jaxpr.eqns:
        inner = e.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if e.primitive.name == "shard_map":
            return inner
        if inner is not None and (found := on_device(inner)) is not None:
            return found
    return None


def inside(equation) -> bool:
    """Whether there is a collective in the regions of an equation."""
    bodies = [b for p in equation.params.values() for b in (p if isinstance(p, tuple) else (p,))]
    graphs = [getattr(b, "jaxpr", b) for b in bodies if hasattr(getattr(b, "jaxpr", b), "eqns")]
    return any(e.primitive.name in COLLECTIVES or inside(e) for g in graphs for e in g.eqns)


@pytest.mark.parametrize("fn", [branch, loops])
def test_one_of_them_comes_first(fn) -> None:
    args = (jnp.ones((8, 8)), jnp.ones((8, 16)))
    found = 0
    for seed in range(6):
        step = autopar.parallelize(fn, cluster=MIDDLE, mesh_shape=(2, 4), search=random_plan(seed))
        pure, *_ = step._pure(args, {})
        traced, plan = pure.plan(pure.resolve(args, {})[0])
        program = lower(traced, plan, jax.devices())
        pairs, free = unordered(on_device(jax.make_jaxpr(program.function)(*program.shapes(traced)).jaxpr))
        assert free == 0, f"{free} of {pairs} pairs with seed {seed}"
        found += pairs
    assert found > 0
