"""Reads and writes at computed positions."""

from __future__ import annotations

from tests.fuzz.draw import Draw


def _indices(d: Draw, n: int, least: int = 0) -> str:
    """Integers from 0 to n - 1, or a few beyond."""
    i = d.pick("int", test=lambda t: least <= len(t.shape) <= 2)
    return f"({i} % {n})" if d.chance(0.8) else f"({i} - 2)"


def take(d: Draw) -> None:
    kind = d.choice(("float", "float", "float", "int", "bool"))
    x = d.pick(kind, test=lambda t: len(t.shape) >= 1)
    axis = d.integer(0, len(d.shape_of(x)) - 1)
    i = _indices(d, d.shape_of(x)[axis])
    mode = d.choice(("clip", "fill", "wrap"))
    fill = ", fill_value=0" if mode == "fill" else ""
    d.add("take", d.choice((f"jnp.take({x}, {i}, axis={axis}, mode={mode!r}{fill})", f"{x}[{i} % {d.shape_of(x)[0]}]",
                            f"jnp.take({x}, {i}, axis={axis}, mode='fill', fill_value=1)",
                            f"{x}.at[{i}].get(mode='promise_in_bounds')" if "%" in i and axis == 0
                            else f"{x}[{i}]")))  # fmt: skip


def take_two(d: Draw) -> None:
    """Several index arrays, with slices between them."""
    x = d.pick(test=lambda t: len(t.shape) >= 2)
    shape = d.shape_of(x)
    n = d.choice((1, 4, 8))
    i, j = d.input("int", (n,)), d.input("int", (n,))
    texts = [
        f"{x}[{i} % {shape[0]}, {j} % {shape[1]}]",
        f"{x}[:, {j} % {shape[1]}]",
        f"{x}[jnp.arange({shape[0]}), {i}[0] % {shape[1]}]",
    ]
    if len(shape) > 2:
        texts.append(f"{x}[{i} % {shape[0]}, :, {j} % {shape[2]}]")
    d.add("take_two", d.choice(texts))


def along(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    shape = d.shape_of(x)
    axis = d.integer(0, len(shape) - 1)
    i = d.input("int", (*shape[:axis], d.choice((1, 2, 8)), *shape[axis + 1 :]))
    mode = d.choice(("", ", mode='clip'", ", mode='fill', fill_value=0"))
    rest = f" % {shape[axis]}" if not mode else ""
    d.add("along", f"jnp.take_along_axis({x}, {i}{rest}, axis={axis}{mode})")


def write(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    shape = d.shape_of(x)
    n = shape[0]
    i = _indices(d, n)
    u = f"jnp.sin({d.broadcastable(shape[1:])})" if shape[1:] else "0.7"
    spread = f"jnp.broadcast_to({u}, {shape[1:]})"
    one = f"{d.pick('int')}.sum() % {n}"
    mode = d.choice(("", ", mode='drop'", ", mode='clip'"))
    texts = (
        f"{x}.at[{i}].add({u}{mode})", f"{x}.at[{i}].add({u}{mode})", f"{x}.at[{i}].multiply(1.1{mode})",
        f"{x}.at[{i}].max({u}{mode})", f"{x}.at[{i}].min({u}{mode})", f"{x}.at[{one}].set({u}{mode})",
        f"{x}.at[{one}].set({spread})", f"{x}.at[:{max(1, n // 2)}].set({u})", f"{x}.at[::2].add({u})",
        f"{x}.at[jnp.argsort({d.pick('int', rank=1)} % 7)[:1] % {n}].set({u}, unique_indices=True)",
        f"{x}.at[{one}].add({u})", f"jax.lax.stop_gradient({x}).at[{i}].apply(jnp.tanh)",
        f"{x}.at[..., 0].set({x}[..., -1] * 2)",
        f"{x}.at[jnp.array([0, {n - 1}])].add({u})", f"{x}.at[{i}].subtract({u}{mode})",
    )  # fmt: skip
    d.add("write", d.choice(texts))


def segments(d: Draw) -> None:
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    n, count = d.shape_of(x)[0], d.choice((3, 4, 8, 16))
    i = d.input("int", (n,))
    texts = (
        f"jax.ops.segment_sum({x}, {i} % {count}, {count})", f"jnp.bincount({i}, length={count}).astype(jnp.int32)",
        f"jax.nn.one_hot({i}, {count})",
        f"jax.nn.one_hot({i} % {count}, {count}).T @ {x}" if len(d.shape_of(x)) < 3 else f"{x}[0]",
        f"jnp.zeros(({count}, *{d.shape_of(x)[1:]})).at[{i} % {count}].add({x})",
        f"jnp.histogram(steps({x}), bins=4, range=(-20.0, 20.0))[0] * 1.0",
    )  # fmt: skip
    d.add("segments", d.choice(texts))


def window(d: Draw) -> None:
    """Slices at a computed start."""
    x = d.pick(test=lambda t: len(t.shape) >= 1)
    shape = d.shape_of(x)
    axis = d.integer(0, len(shape) - 1)
    size = d.integer(1, shape[axis])
    i = f"{d.pick('int')}.sum() % {shape[axis] + 1}"
    sizes = tuple(size if a == axis else n for a, n in enumerate(shape))
    texts = (
        f"jax.lax.dynamic_slice_in_dim({x}, {i}, {size}, axis={axis})",
        f"jax.lax.dynamic_index_in_dim({x}, {i}, axis={axis}, keepdims=False)",
        f"jax.lax.dynamic_update_slice_in_dim({x}, jnp.ones({sizes}) * 0.3, {i}, axis={axis})",
        f"jax.lax.dynamic_update_slice_in_dim({x}, {x}[{', '.join(f':{n}' for n in sizes)}] * 2, {i}, axis={axis})",
        f"jax.lax.dynamic_slice({x}, ({', '.join([i] * len(shape))},), {sizes})", f"jnp.roll({x}, {i}, axis={axis})",
    )  # fmt: skip
    d.add("window", d.choice(texts))


MAKERS = {"take": (2.5, take), "take_two": (1.0, take_two), "along": (1.0, along), "write": (2.5, write),
          "segments": (1.0, segments), "window": (1.5, window)}  # fmt: skip
