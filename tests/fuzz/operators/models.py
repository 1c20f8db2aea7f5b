"""Parts of models that are planned as a whole: attention, experts, and layers in a loop over their stacks."""

from __future__ import annotations

import math

from tests.fuzz.draw import Draw, Rejected


def _of_size(d: Draw, shape: tuple[int, ...]) -> str:
    """A float of a shape, perhaps a value that is there in another shape."""
    found = [n for n in d.visible() if d.types[n].kind == "float" and d.types[n].size == math.prod(shape)]
    if found and d.chance(0.6):
        name = d.choice(found)
        return name if d.shape_of(name) == shape else f"{name}.reshape({shape})"
    return d.input("float", shape)


def attention(d: Draw) -> None:
    """Scores, perhaps masked, scaled, capped or biased; softmax; product with the values."""
    batch, tokens, heads, dims = d.choice((1, 2)), d.choice((8, 16, 16)), d.choice((1, 2, 2, 8)), d.choice((2, 4))
    if batch * tokens * heads * dims > 512:
        raise Rejected("too large")
    shared = d.chance(0.2)
    q = _of_size(d, (batch, tokens, heads, dims))
    k, v = (_of_size(d, (batch, tokens, 1 if shared else heads, dims)) for _ in "kv")
    if shared:
        k, v = (f"jnp.broadcast_to({a}, {(batch, tokens, heads, dims)})" for a in (k, v))
    rows_last = d.chance(0.2)
    scores = f"jnp.einsum('bqhd,bkhd->{'bhkq' if rows_last else 'bhqk'}', {q}, {k}) * {round(dims**-0.5, 3)}"
    row, key = f"jnp.arange({tokens})[:, None]", f"jnp.arange({tokens})[None]"
    if rows_last:
        row, key = key, row
    if d.chance(0.2):
        scores = f"2.0 * jnp.tanh(({scores}) / 2.0)"
    if d.chance(0.2):
        scores = f"({scores} - 0.1 * jnp.abs({row} - {key}))"
    masks = ["", f"{row} >= {key}", f"{row} >= {key}", f"({row} >= {key}) & ({row} - {key} < 5)", f"{row} + 1 >= {key}"]
    mask = d.choice(masks)
    if mask:
        if d.chance(0.3):
            ids = d.input("int", (tokens,))
            mask = f"({mask}) & (({ids}[:, None] // 4 == {ids}[None] // 4) | ({row} == {key}))"
        scores = f"jnp.where({mask}, {scores}, {d.choice(('-1e9', '-jnp.inf', '-1e30', '-3.0'))})"
    weights = f"jax.nn.softmax({scores}, axis={-2 if rows_last else -1})"
    form = "bhkq,bkhd->bqhd" if rows_last else "bhqk,bkhd->bqhd"
    text = f"jnp.einsum('{form}', {weights}, {v})"
    if d.chance(0.2):
        text = f"jax.checkpoint(lambda: {text})()"
    d.add("attention", text)


def experts(d: Draw) -> None:
    """Tokens sorted by expert and ragged products, or slots of a capacity and one product."""
    tokens, count, width, out = d.choice((8, 16, 13)), d.choice((4, 8, 8)), d.choice((4, 8)), d.choice((4, 8))
    x, w, ids = _of_size(d, (tokens, width)), d.input("float", (count, width, out)), d.input("int", (tokens,))
    if d.chance(0.5):
        text = (
            f"(lambda e: jnp.zeros(({tokens}, {out}), {x}.dtype).at[jnp.argsort(e)].set(jax.lax.ragged_dot("
            f"({x})[jnp.argsort(e)], {w}, jnp.bincount(e, length={count}).astype(jnp.int32))))({ids} % {count})"
        )
    else:
        capacity = d.choice((2, 4))
        text = (
            f"(lambda o: (lambda s: jnp.einsum('tec,ecf->tf', s, jnp.tanh(jnp.einsum('tec,td,edf->ecf', s, {x}, {w}))))"
            f"(jax.nn.one_hot((jnp.cumsum(o, 0) * o).astype(jnp.int32) - 1, {capacity}, dtype={x}.dtype)))"
            f"(jax.nn.one_hot({ids} % {count}, {count}, dtype={x}.dtype))"
        )
    d.add("experts", text)


def layers(d: Draw) -> None:
    """A loop over stacks of parameters, one layer a turn."""
    rows, width, depth = d.choice((4, 8)), d.choice((4, 8)), d.choice((2, 3, 8))
    x, w, b = _of_size(d, (rows, width)), d.input("float", (depth, width, width)), d.input("float", (depth, width))
    body = f"lambda h, p: (jnp.tanh(h @ p[0] * {round(width**-0.5, 3)} + p[1]), jnp.sum(h, 0))"
    if d.chance(0.4):
        body = f"jax.checkpoint({body})"
    options = ", reverse=True" if d.chance(0.2) else ""
    d.add("layers", f"jax.lax.scan({body}, {x}, ({w}, {b}){options})")


MAKERS = {"attention": (3.0, attention), "experts": (2.0, experts), "layers": (2.0, layers)}
