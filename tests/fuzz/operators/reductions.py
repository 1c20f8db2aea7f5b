"""Reductions, running sums, sorting."""

from __future__ import annotations

import math

from tests.fuzz.draw import Draw, Rejected


def _axes(d: Draw, x: str) -> tuple[int, ...]:
    return tuple(d.some(range(len(d.shape_of(x)))))


def reduction(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    axes = _axes(d, x)
    keep = d.choice(("", ", keepdims=True"))
    end = f"axis={axes}{keep})"
    scale = round(math.prod(d.shape_of(x)[a] for a in axes) ** -0.5, 3)
    texts = (
        f"jnp.sum({x}, {end} * {scale}", f"jnp.sum({x}, {end} * {scale}", f"jnp.mean({x}, {end}", f"jnp.max({x}, {end}",
        f"jnp.min({x}, {end}", f"jnp.prod(1 + 0.1 * jnp.tanh({x}), {end}", f"jnp.var({x}, {end}",
        f"jax.nn.logsumexp({x}, {end}", f"jnp.sqrt(1 + jnp.sum({x} ** 2, {end})", f"jnp.any(steps({x}) > 3, {end}",
        f"jnp.all(steps({x}) < 9, {end}", f"jnp.sum((steps({x}) > 0).astype(jnp.int32), {end}",
        f"jnp.count_nonzero(steps({x}), {end}.astype(jnp.int32)", f"jnp.mean({x} * {x}, {end}",
    )  # fmt: skip
    d.add("reduction", d.choice(texts))


def normalize(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    axis = d.integer(0, len(d.shape_of(x)) - 1)
    texts = (
        f"({x} - {x}.mean({axis}, keepdims=True)) * jax.lax.rsqrt({x}.var({axis}, keepdims=True) + 0.1)",
        f"{x} * jax.lax.rsqrt(jnp.mean({x} ** 2, -1, keepdims=True) + 0.1)", f"jax.nn.softmax({x}, axis={axis})",
        f"{x} - jax.nn.logsumexp({x}, axis={axis}, keepdims=True)", f"{x} / (1 + jnp.sum({x} ** 2))",
        f"({x} - {x}.mean()) / (1 + {x}.var())",
    )  # fmt: skip
    d.add("normalize", d.choice(texts))


def place(d: Draw) -> None:
    """Positions."""
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    axis = d.integer(0, len(d.shape_of(x)) - 1)
    end = f"axis={axis}).astype(jnp.int32)"
    texts = (f"jnp.argmax(steps({x}), {end}", f"jnp.argmin(steps({x}), {end}", f"jnp.argsort(steps({x}), {end}",
             f"jnp.argmax(steps({x})).astype(jnp.int32)",
             f"jnp.searchsorted(jnp.arange(9.0), steps({x})).astype(jnp.int32)")  # fmt: skip
    d.add("place", d.choice(texts))


def order(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    axis = d.integer(0, len(d.shape_of(x)) - 1)
    k = d.integer(1, d.shape_of(x)[-1])
    texts = (
        f"jnp.sort({x}, axis={axis})", f"jax.lax.top_k({x}, {k})[0]", f"jax.lax.top_k(steps({x}), {k})[1]",
        f"jnp.median({x} * 1.0, axis={axis})", f"jnp.percentile({x}, 30, axis={axis})",
        f"jax.lax.sort((steps({x}), {x}), dimension={axis}, num_keys=1)",
    )  # fmt: skip
    d.add("order", d.choice(texts))


def running(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    axis = d.integer(0, len(d.shape_of(x)) - 1)
    scale = round(d.shape_of(x)[axis] ** -0.5, 3)
    texts = (
        f"jnp.cumsum({x}, axis={axis}) * {scale}", f"jnp.cumprod(1 + 0.1 * jnp.tanh({x}), axis={axis})",
        f"jax.lax.cummax({x}, axis={axis})", f"jax.lax.cumlogsumexp({x}, axis={axis})", f"jnp.diff({x}, axis={axis})",
        f"jax.lax.cumsum({x}, axis={axis}, reverse=True) * {scale}",
        f"jnp.cumsum(steps({x}) > 0, axis={axis}).astype(jnp.int32)",
        f"jax.lax.associative_scan(jnp.add, {x}, axis={axis}) * {scale}",
        f"jax.lax.associative_scan(lambda p, q: p + q + 0.01 * p * q, 0.1 * {x}, axis={axis})",
        f"jax.lax.cummin({x}, axis={axis})", f"jnp.trapezoid({x}, axis={axis})",
    )  # fmt: skip
    d.add("running", d.choice(texts))


def general(d: Draw) -> None:
    """Reductions with a function of the user."""
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    if d.types[x].size > 256:
        raise Rejected("too large")
    axes = _axes(d, x)
    d.add("general", f"jax.lax.stop_gradient(jax.lax.reduce(steps({x}), 0.0, lambda p, q: jnp.maximum(p, q), {axes}))")


MAKERS = {"reduction": (5.0, reduction), "normalize": (2.0, normalize), "place": (1.0, place), "order": (1.0, order),
          "running": (1.5, running), "general": (0.3, general)}  # fmt: skip
