"""Helpers that close over arrays, mutable references, loops of no trips, weak types, settings of jax, callbacks."""

from __future__ import annotations

from tests.fuzz.draw import Draw
from tests.fuzz.operators.structure import _deep, _fill, _into
from tests.fuzz.program import Body


def _same_shape(d: Draw, most: int = 512) -> tuple[str, Body]:
    """A value, and a function from its shape to its shape."""
    _deep(d)
    x = d.pick(test=lambda t: len(t.shape) >= 1 and 0 < t.size <= most)

    def fill(names: list[str]) -> str:
        _fill(d, d.integer(0, 2))
        return _into(d, names[0], d.shape_of(x))

    return x, d.body([d.types[x]], fill)


def helper(d: Draw) -> None:
    """A jitted function that closes over a numpy array, alone, in another one, or in a loop, a branch, a vmap."""
    x, body = _same_shape(d)
    size, rank = d.shape_of(x)[-1], len(d.shape_of(x))
    inner = f"(lambda c: jax.jit(lambda r: {body.name}(r * c)))(table({size}))"
    texts = [
        f"{inner}({x})",
        f"(lambda c: jax.jit(lambda r: {inner}(r + c)))(table({size}))({x})",
        f"jax.lax.scan(lambda c, _: ({inner}(c), jnp.mean(c)), {x}, None, length={d.integer(0, 3)})[0]",
        f"jax.lax.cond(steps(jnp.mean({x})) > 0, {inner}, jnp.sin, {x})",
        f"jax.checkpoint({inner})({x})",
    ]
    if rank > 1:
        # The body is of whole values: what is mapped is the helper alone.
        texts.append(f"jax.vmap((lambda c: jax.jit(lambda r: r * c))(table({size})))({body.name}({x}))")
    d.add("helper", d.choice(texts), [body])


def reference(d: Draw) -> None:
    """A value that a loop writes to a reference, or adds up in one."""
    x, body = _same_shape(d, 256)
    trips = d.integer(0, 3)
    d.add("reference", f"{d.choice(('recorded', 'added_up'))}({body.name}, {x}, {trips})", [body])


def no_trips(d: Draw) -> None:
    """A loop that never runs its body."""
    x, body = _same_shape(d)
    f = body.name
    texts = (
        f"jax.lax.scan(lambda c, t: ({f}(c) * t, jnp.sum(c)), {x}, jnp.zeros(0))[0]",
        f"jax.lax.scan(lambda c, _: ({f}(c), c), {x}, None, length=0)[1].sum() + {x}",
        f"jax.lax.fori_loop(0, 0, lambda i, c: {f}(c), {x})",
        f"jax.lax.map({f}, jnp.stack([{x}])[:0]).sum(0) + {x}",
        f"jax.lax.scan(jax.checkpoint(lambda c, t: ({f}(c), t)), {x}, jnp.zeros((0, 3)))[0]",
    )
    d.add("no_trips", d.choice(texts), [body])


def weak(d: Draw) -> None:
    """Numbers without a dtype of their own, in loops, calls and barriers."""
    x = d.pick(test=lambda t: len(t.shape) >= 1 and 0 < t.size <= 512)
    texts = (
        f"jax.lax.scan(lambda c, r: (c * 0.5, c * r), 1.0, {x})[1]",
        f"{x} * jax.jit(lambda v: v + 1)(2)",
        f"{x} + jax.lax.optimization_barrier(2.0)",
        f"jnp.where({x} > 0, {x}, jnp.asarray(2) * 0.5)",
        f"jax.lax.fori_loop(0, 3, lambda i, c: c + i, 0) * {x}",
    )
    d.add("weak", d.choice(texts))


def settings(d: Draw) -> None:
    """A part of the program under another setting of jax."""
    x, body = _same_shape(d)
    name, value = d.choice(
        (("default_matmul_precision", "float32"), ("threefry_partitionable", False), ("numpy_rank_promotion", "warn"))
    )
    d.add("settings", f"under({name!r}, {value!r}, {body.name}, {x})", [body])


def callback(d: Draw) -> None:
    """A call into Python, alone, or in a loop, a branch, a vmap."""
    x = d.pick(test=lambda t: len(t.shape) >= 1 and 0 < t.size <= 256)
    call = f"lambda r: called({d.choice(('pure', 'pure', 'io', 'jax', 'debug'))!r}, r)"
    texts = (
        f"({call})({x})",
        f"jax.jit({call})({x})",
        f"jax.lax.scan(lambda c, r: (c, ({call})(r)), 0.0, {x})[1]",
        f"jax.lax.cond(steps(jnp.mean({x})) > 0, {call}, jnp.sin, {x})",
        f"jax.vmap({call})({x})",
        f"jax.checkpoint({call})({x})",
    )
    d.add("callback", d.choice(texts))


MAKERS = {"helper": (1.5, helper), "reference": (0.8, reference), "no_trips": (0.8, no_trips), "weak": (0.6, weak),
          "settings": (0.4, settings), "callback": (1.0, callback)}  # fmt: skip
