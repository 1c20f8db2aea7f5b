"""Pipelines as one XLA program on the devices of this process: the values of the pipeline that walks its lists."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.hosts.one_program import load_world


def both(fn: Any, args: Any, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Results of the pipeline that walks its lists, those of one program after two calls, and that program."""
    return of_step(autopar.parallelize(fn, **options), args)


def of_step(step: Any, args: Any) -> tuple[list[Any], list[Any], Any]:
    """`both` of a step that is decorated."""
    compiled = step.compile(*args)
    local, leaves = compiled.local, jax.tree.leaves(args)
    want = local.run(local.place_all(leaves), leaves)
    one = load_world(compiled.traced, local.split_step, local.lowered, jax.devices(), local.donated)
    got = one.run(one.place_all(leaves), leaves)
    again = one.run(one.place_all(leaves), leaves)
    assert all(np.array_equal(data(a), data(b)) for a, b in zip(got, again, strict=True))
    return list(got), list(want), one


def by_hand(**options: Any) -> dict[str, Any]:
    """Options of two stages of four devices, for which nothing is searched."""
    return {"search": autopar.search.Manual(dp=4, pp=2), "num_microbatches": 2, **options}


def data(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def same(got: list[Any], want: list[Any], within: float = 0.0) -> None:
    """Equal to the bit, or ``within``: one program is fused otherwise than many."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(data(a), data(b), rtol=within, atol=0)


def layers(w: Any, x: Any) -> Any:
    for m in w["layers"]:
        x = jnp.tanh(x @ m)
    return x


def state(depth: int = 4, width: int = 8, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"layers": [draw.normal(size=(width, width)) for _ in range(depth)]}


def batch(rows: int = 16, width: int = 8) -> Any:
    return np.random.default_rng(9).normal(size=(rows, width))


def train(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: (layers(w, x) ** 2).mean())(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def with_keys(w: Any, x: Any) -> Any:
    """Dropout by a typed key, which every stage splits for itself."""
    key, used = jax.random.split(w["key"])

    def loss(m: Any) -> Any:
        y = x
        for n, one in enumerate(m):
            keep = jax.random.bernoulli(jax.random.fold_in(used, n), 0.9, (one.shape[1],))
            y = jnp.tanh(y @ one) * keep
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(w["layers"])
    return {"layers": [a - 0.1 * g for a, g in zip(w["layers"], grads, strict=True)], "key": key}, value


def stacked(w: Any, x: Any) -> Any:
    """Layers in one array, looped over."""

    def loss(m: Any) -> Any:
        return (jax.lax.scan(lambda y, one: (jnp.tanh(y @ one), None), x, m)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(w)
    return w - 0.1 * grads, value


def tied(w: Any, x: Any) -> Any:
    """The first matrix is the last one too; a metric of the whole batch, and one an example."""

    def loss(w: Any) -> Any:
        y = layers(w, jnp.tanh(x @ w["layers"][0])) @ w["layers"][0].T
        return (y**2).mean(), y.sum(1)

    (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(w)
    norm = sum((g**2).sum() for g in jax.tree.leaves(grads))
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), {"loss": value, "rows": rows, "norm": norm}


def test_stages_with_two_workers(x64: None) -> None:
    got, want, one = both(train, (state(), batch()), **by_hand(num_microbatches=4, schedule="chimera"))
    same(got, want)
    assert len(one.meshes) == 2


def test_a_schedule_that_is_written_as_a_table(x64: None) -> None:
    table = """
    0 | F0.0 F0.1 F0.2 .    .    B0.1 B0.0 B0.2
    1 | .    F1.1 B1.1 F1.0 B1.0 F1.2 B1.2 .
    """
    schedule = autopar.schedule.get("table", text=table)
    got, want, one = both(train, (state(), batch(24)), **by_hand(num_microbatches=3, schedule=schedule))
    same(got, want)
    assert len(one.meshes) == 2


def test_random_keys_go_between_stages(x64: None) -> None:
    args = ({**state(), "key": jax.random.key(3)}, batch())
    got, want, _ = both(with_keys, args, **by_hand())
    same(got, want)


def test_layers_of_several_stages_in_one_array(x64: None) -> None:
    args = (np.stack(state()["layers"]), batch())
    got, want, one = both(stacked, args, **by_hand())
    same(got, want)
    weights = got[0]
    assert weights.sharding == one.program.input_shardings[0] == one.program.output_shardings[0]
    assert max(s.data.shape[0] for s in weights.addressable_shards) == 2  # a device has the layers of its stage alone


def test_parameters_of_two_stages_metrics_and_recomputation(x64: None) -> None:
    got, want, _ = both(tied, (state(), batch()), **by_hand(search=autopar.search.Manual(dp=4, pp=2, recompute="full")))
    same(got, want, within=1e-13)


@pytest.mark.parametrize("depth", [pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 6])
def test_stages_with_different_meshes(x64: None, depth: int) -> None:
    got, want, one = both(train, (state(depth), batch()), num_stages=3, num_microbatches=4)
    same(got, want)
    assert sorted(m.size for m in one.meshes) == [2, 2, 4]


def smoothed(w: Any, x: Any) -> Any:
    """Windows over a dim that is split: every device needs the edges of its neighbours."""

    def loss(w: Any) -> Any:
        y = x
        for m in w["layers"]:
            y = jnp.tanh(y + jnp.roll(y, 1, axis=1) * m[0, 0] - jnp.pad(y, ((0, 0), (1, 0)))[:, :-1] * m[1, 1])
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def test_a_dim_whose_edges_are_exchanged_inside_of_a_stage(x64: None) -> None:
    step = autopar.parallelize(
        smoothed,
        constraints={"x": jax.P(None, "columns")},
        num_stages=2,
        num_microbatches=2,
        mesh_axes={"columns": 4},
    )
    args = state(), batch(4, 32)
    got, want, _ = of_step(step, args)
    same(got, want, within=1e-13)
    assert "collective-permute" in {r.kind for r in step.plan(*args).communication}
