"""Operators that move elements."""

from __future__ import annotations

import math

from tests.fuzz.draw import Draw, Rejected


def _value(d: Draw, least: int = 1) -> str:
    kind = d.choice(("float",) * 6 + ("int", "bool"))
    return d.pick(kind, test=lambda t: len(t.shape) >= least)


def _dim(d: Draw, x: str) -> int:
    if not d.shape_of(x):
        raise Rejected("scalar")
    return d.integer(0, len(d.shape_of(x)) - 1)


def reshape(d: Draw) -> None:
    x = _value(d)
    left, dims = math.prod(d.shape_of(x)), []
    if d.chance(0.5):  # merge neighbours, split one
        dims = list(d.shape_of(x))
        if len(dims) > 1 and d.chance(0.6):
            at = d.integer(0, len(dims) - 2)
            dims[at : at + 2] = [dims[at] * dims[at + 1]]
        if d.chance(0.6):
            at = d.integer(0, len(dims) - 1)
            n = d.choice([k for k in range(1, dims[at] + 1) if dims[at] % k == 0])
            dims[at : at + 1] = [n, dims[at] // n]
    else:
        while left > 1 and len(dims) < 4:
            n = d.choice([k for k in range(1, left + 1) if left % k == 0])
            dims.append(n)
            left //= n
        dims.append(left)
    order = ", order='F'" if d.chance(0.1) else ""
    d.add("reshape", f"jnp.reshape({x}, {tuple(dims)}{order})")


def transpose(d: Draw) -> None:
    x = _value(d, 2)
    d.add("transpose", f"jnp.transpose({x}, {tuple(int(i) for i in d.rng.permutation(len(d.shape_of(x))))})")


def ranks(d: Draw) -> None:
    x = _value(d)
    at, shape = _dim(d, x), d.shape_of(x)
    new = (*shape[:at], d.choice((2, 3, 8)), *shape[at:])
    texts = [
        f"jnp.expand_dims({x}, {at})", f"jnp.broadcast_to(jnp.expand_dims({x}, {at}), {new})",
        f"jnp.repeat({x}, {d.choice((2, 3))}, axis={at})", f"jnp.tile({x}, {d.choice((2, 3))})", f"jnp.ravel({x})",
    ]  # fmt: skip
    if 1 in shape:
        texts += [f"jnp.squeeze({x}, {shape.index(1)})"] * 3
    d.add("ranks", d.choice(texts))


def join(d: Draw) -> None:
    x = _value(d)
    at = _dim(d, x)
    kind, shape = d.types[x].kind, d.shape_of(x)
    same = [
        n
        for n in d.visible()
        if d.types[n].kind == kind and len(d.shape_of(n)) == len(shape)
        and all(i == at or a == b for i, (a, b) in enumerate(zip(d.shape_of(n), shape, strict=True)))
    ]  # fmt: skip
    others = [d.choice(same) for _ in range(d.integer(1, 2))]
    if d.chance(0.3):
        others.append(d.input(kind, (*shape[:at], d.choice((1, 2, 4, 8)), *shape[at + 1 :])))
    if all(d.shape_of(o) == shape for o in others) and d.chance(0.4):
        d.add("join", f"jnp.stack([{', '.join([x, *others])}], axis={at})")
    else:
        d.add("join", f"jnp.concatenate([{', '.join([*others, x])}], axis={at})")


def pad(d: Draw) -> None:
    x = d.pick()
    config = []
    for n in d.shape_of(x):
        low, high, inner = d.choice(
            ((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 3, 0), (1, 2, 0), (-1, 2, 0), (2, -1, 1), (0, 0, 1))
        )
        config.append((low, high, inner) if n > 1 else (0, 0, 0))
    value = d.choice(("0.0", "1.5", f"jnp.max({d.pick()})"))
    mode = d.choice(("constant", "edge", "reflect", "wrap"))
    texts = (f"jax.lax.pad({x}, {value}, {tuple(config)})", f"jnp.pad({x}, {d.choice((1, 2))}, mode={mode!r})")
    d.add("pad", texts[0] if d.chance(0.7) else texts[1])


def cut(d: Draw) -> None:
    x = _value(d)
    parts = []
    for n in d.shape_of(x):
        options = [":", ":", "::2", "::-1", f":{max(1, n // 2)}", f"{n // 2}:", f"1:{n}", str(n - 1), "None, :", "..."]
        part = d.choice(options)
        parts.append(":" if part == "..." and "..." in parts else part)
    d.add("cut", f"{x}[{', '.join(parts)}]")


def move(d: Draw) -> None:
    x = _value(d)
    at = _dim(d, x)
    n = d.shape_of(x)[at]
    texts = [f"jnp.flip({x}, {at})", f"jnp.roll({x}, {d.integer(1, 5)}, axis={at})", f"jnp.swapaxes({x}, 0, {at})",
             f"jnp.moveaxis({x}, {at}, 0)"]  # fmt: skip
    halves = [k for k in range(2, n + 1) if n % k == 0]
    if halves:
        texts += [f"jnp.split({x}, {d.choice(halves)}, axis={at})[{d.integer(0, 1)}]"] * 2
    if d.types[x].kind == "float" and len(d.shape_of(x)) > 1:
        texts += [f"jnp.tril({x})", f"jnp.triu({x}, 1)", f"jnp.rot90({x})"]
    d.add("move", d.choice(texts))


def made(d: Draw) -> None:
    """Values from nothing."""
    shape = d.shape(1, 3)
    n = d.choice((4, 5, 8, 16))
    texts = (f"jnp.ones({shape})", f"jnp.arange({n}) * 1.0", f"jnp.eye({n})", f"jnp.linspace(0.0, 1.0, {n})",
             f"jnp.arange({n}, dtype=jnp.int32)", f"jax.lax.broadcasted_iota(jnp.int32, {shape}, 0)",
             f"jnp.full({shape}, 0.3)", f"jnp.tri({n}, dtype=jnp.float64)",
             f"jnp.array({[round(0.1 * k, 1) for k in range(n)]})",
             f"jnp.zeros({shape})", f"jnp.ones({shape}, bool)")  # fmt: skip
    d.add("made", d.choice(texts))


def resize(d: Draw) -> None:
    """Larger or smaller along one dim; most by a whole factor, as images are."""
    x = d.pick("float", test=lambda t: len(t.shape) >= 1)
    at, shape = _dim(d, x), list(d.shape_of(x))
    sizes = [2 * shape[at], 3 * shape[at], shape[at] + 1, *(shape[at] // n for n in (2, 3) if shape[at] % n == 0)]
    shape[at] = d.choice(sizes)
    method = d.choice(("nearest", "bilinear", "bilinear", "cubic"))
    d.add("resize", f"jax.image.resize({x}, {tuple(shape)}, {method!r})")


MAKERS = {"reshape": (5.0, reshape), "transpose": (3.0, transpose), "ranks": (3.0, ranks), "join": (2.0, join),
          "pad": (2.0, pad), "cut": (3.0, cut), "move": (3.0, move), "made": (1.0, made),
          "resize": (1.0, resize)}  # fmt: skip
