"""Random numbers: equal bits on any number of devices."""

from __future__ import annotations

from tests.fuzz.draw import Draw


def draws(d: Draw) -> None:
    k = d.pick(d.choice(("key", "key", "rawkey")), test=lambda t: t.shape == () or t.kind == "rawkey")
    shape = d.shape(1, 3)
    texts = (
        f"jax.random.normal({k}, {shape}, jnp.float64)", f"jax.random.uniform({k}, {shape}, jnp.float64)",
        f"jax.random.bernoulli({k}, 0.4, {shape})", f"jax.random.randint({k}, {shape}, 0, 9, jnp.int32)",
        f"jax.random.normal(jax.random.fold_in({k}, {d.integer(0, 9)}), {shape}, jnp.float64)",
        f"jax.random.normal(jax.random.split({k}, 3)[1], {shape}, jnp.float64)",
        f"jax.random.gumbel({k}, {shape}, jnp.float64) * 0.3",
        f"jax.random.truncated_normal({k}, -1.0, 1.0, {shape}, jnp.float64)",
        f"jax.random.permutation({k}, {d.choice((4, 7, 8))}).astype(jnp.int32)",
        f"jax.random.exponential({k}, {shape}, jnp.float64) * 0.3",
        f"jax.random.categorical({k}, jnp.zeros({shape})).astype(jnp.int32)",
        f"jax.random.rademacher({k}, {shape}, jnp.int32)",
        f"jax.vmap(lambda q: jax.random.normal(q, (4,), jnp.float64))(jax.random.split({k}, 8))",
        f"jax.random.split({k}, 2)[0]" if d.types[k].kind == "key" else f"jax.random.bits({k}, {shape}) % 7 > 2",
        f"jax.random.choice({k}, 5, {shape}).astype(jnp.int32)",
        f"jax.random.bits({k}, {shape}, 'uint8').astype(jnp.int32)",
        f"jax.random.normal({k}, {shape}, jnp.float32).astype(jnp.float64) * 0.1",
        f"jax.random.laplace({k}, {shape}, jnp.float64) * 0.3",
    )  # fmt: skip
    d.add("draws", d.choice(texts))


def dropout(d: Draw) -> None:
    k, x = d.pick("key", test=lambda t: t.shape == ()), d.pick(test=lambda t: len(t.shape) >= 1)
    shape = d.shape_of(x)
    some = tuple(n if d.chance(0.7) else 1 for n in shape)
    texts = (f"jnp.where(jax.random.bernoulli({k}, 0.7, {some}), {x} / 0.7, 0)",
             f"{x} + 0.1 * jax.random.normal({k}, {shape}, jnp.float64)",
             f"{x} * jax.random.bernoulli(jax.random.fold_in({k}, 1), 0.5, {some})",
             f"jax.random.permutation({k}, {x}, axis={d.integer(0, len(shape) - 1)})")  # fmt: skip
    d.add("dropout", d.choice(texts))


def rows(d: Draw) -> None:
    """A key a row."""
    k = d.input("key", (d.choice((2, 3, 8)),))
    d.add("rows", d.choice((f"jax.vmap(lambda q: jax.random.normal(q, (4,), jnp.float64))({k})",
                            f"jax.vmap(jax.random.fold_in, (0, None))({k}, 3)[0]",
                            f"jax.lax.map(lambda q: jax.random.uniform(q, (8,), jnp.float64), {k})")))  # fmt: skip


MAKERS = {"draws": (1.5, draws), "dropout": (1.5, dropout), "rows": (0.4, rows)}
