"""Reads and products by fixed tables, as `jax.image.resize` makes them, keep their meaning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir import Graph
from tests.frontend.reference import check

RNG = np.random.default_rng(0)
# Whole numbers: sums are exact in any order.
X = jnp.asarray(RNG.integers(-9, 9, (2, 24, 5)), jnp.float32)
W = jnp.asarray(RNG.integers(-9, 9, (2, 48, 5)), jnp.float32)


def to(size, method):
    return lambda x: jax.image.resize(x, (2, size, 5), method)


def read(index):
    return lambda x: x[:, index(x.shape[1])]


FIXED = {
    "nearest, twice": to(48, "nearest"),
    "nearest, three times": to(72, "nearest"),
    "nearest, a third": to(8, "nearest"),
    "halved numbers": read(lambda n: jnp.arange(2 * n) // 2),
    "every other": read(lambda n: jnp.arange(n // 2) * 2 + 1),
    "fewer of them": read(lambda n: jnp.arange(5) * 2),
}
OTHERS = {
    "not whole": to(36, "nearest"),
    "backwards": read(lambda n: jnp.arange(n)[::-1]),
    "shifted": read(lambda n: (jnp.arange(2 * n) + 1) // 2),
    "fewer than twice": read(lambda n: jnp.arange(2 * n - 2) // 2),
    "beyond the end": read(lambda n: jnp.arange(n - 1) * 2),
    "tiled": read(lambda n: jnp.arange(2 * n) % n),
}


def names(graph: Graph) -> set[str]:
    return {op.primitive for op in graph.operators}


def gradient(fn):
    return jax.grad(lambda x: (fn(x) ** 3).sum())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FIXED)
def test_fixed_reads_are_no_gathers(name):
    for fn in (FIXED[name], gradient(FIXED[name])):
        assert not names(check(fn, X).graph) & {"gather", "scatter-add"}
    for x in (jnp.arange(240).reshape(2, 24, 5), X > 0):
        assert "gather" not in names(check(FIXED[name], x).graph)


@pytest.mark.parametrize("name", OTHERS)
def test_other_reads_are(name):
    assert "gather" in names(check(OTHERS[name], X).graph)
    assert "scatter-add" in names(check(gradient(OTHERS[name]), X).graph)


def test_writes_add_to_what_is_there():
    fn = lambda x, w: x.at[:, jnp.arange(48) // 2].add(w)  # noqa: E731
    assert "scatter-add" not in names(check(fn, X, W).graph)


def bands(fn, *args):
    return [dict(op.attrs)["band"] for op in check(fn, *args).graph.operators if "band" in dict(op.attrs)]


def test_interpolation_has_a_band():
    assert bands(to(48, "bilinear"), X) == [(1, 24, 48, 1, 4, 2, 2)]
    assert len(bands(gradient(to(48, "bilinear")), X)) == 2
    assert len(bands(to(12, "bilinear"), X)) == 1
    assert len(bands(to(48, "bicubic"), X)) == 1


def test_other_products_have_none():
    dense = lambda x: jnp.einsum("bsk,st->btk", x, jnp.sin(jnp.arange(24.0)[:, None] * jnp.arange(48.0)))  # noqa: E731
    given = lambda x, w: jnp.einsum("bsk,st->btk", x, w)  # noqa: E731
    assert not bands(dense, X) and not bands(given, X, jnp.eye(24))
