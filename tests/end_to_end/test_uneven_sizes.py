"""Dims that eight devices do not divide are padded inside: values, what a device holds, and where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import autopar
from autopar.lower.padded import padded
from autopar.lower.retrace import Recorder, run_whole
from autopar.sharding.padding import candidates, padded_size
from tests.search.problems import toy

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FREE = {"num_stages": 1, "num_microbatches": 1, "remat": "none"}


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape))


def language_model(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens[:, :-1]]
    batch, seq, _ = x.shape
    q, k, v = (
        (x @ p[n]).reshape(batch, seq, -1, 4)  # heads of 4
        for n in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, seq, -1)
    logits = (x + mixed @ p["out"]) @ p["embed"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    right = (jnp.argmax(logits, -1) == tokens[:, 1:]).sum()
    return -chosen.mean() + 0.01 * jnp.logaddexp.reduce(logits, axis=-1).max() + 0 * right


def train_step(p: Any, tokens: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(language_model)(p, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss


def arguments(vocab: int, heads: int, batch: int, seq: int = 4, width: int = 6) -> tuple[Any, jax.Array]:
    inner = 4 * heads
    params = {"embed": drawn(vocab, width), "out": drawn(inner, width)}
    params |= {n: drawn(width, inner, seed=i) for i, n in enumerate(("query", "key", "value"))}
    return params, jnp.asarray(np.random.default_rng(1).integers(0, vocab, (batch, seq + 1)))


def run_padded(step: Any, args: Any, pieces: int, waste: float, chosen: int | None = None) -> Any:
    """What a step returns with dims padded, by jax's own primitives; how many classes were."""
    pure = autopar.parallelize(step, cluster=toy(8))._plain
    traced = pure.traced(pure.resolve(args, {})[0])
    found = candidates(traced.graph, pieces, waste)
    some = found if chosen is None else found[chosen % len(found) : chosen % len(found) + 1] if found else ()
    form = padded(traced, [d for c in some for d in c.dims(traced.graph)])
    names = [i.name for i in form.graph.inputs]

    def run(*arrays: Any) -> list[Any]:
        env = run_whole(form.program, dict(zip(names, arrays, strict=True)), Recorder.after(form.program))
        return [env[str(o.operand)] for o in form.graph.outputs]

    leaves = jax.tree.leaves(args)
    return form.results(jax.jit(run).lower(*leaves).compile(QUICK)(*leaves)), len(some)


CASES = {
    "sizes": st.tuples(st.integers(3, 40), st.sampled_from((1, 3, 6, 12)), st.integers(1, 7)),
    "pieces": st.sampled_from((2, 4, 8)),
    "chosen": st.sampled_from((None, 0, 1, 2)),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_values_and_gradients_of_many_padded_steps_are_those_without(sizes, pieces, chosen):
    values_are_those_without_padding(sizes, pieces, chosen)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(**CASES)
def test_values_and_gradients_of_padded_steps_are_those_without(sizes, pieces, chosen):
    values_are_those_without_padding(sizes, pieces, chosen)


def values_are_those_without_padding(sizes: tuple[int, int, int], pieces: int, chosen: int | None) -> None:
    with jax.enable_x64(True):
        args = arguments(*sizes)
        got, _ = run_padded(train_step, args, pieces, 2.0, chosen)
        want = jax.jit(train_step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), got, want)


@pytest.mark.few(5)
@pytest.mark.parametrize("mode", ["clip", "fill", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_positions_beyond_the_size_mean_what_they_mean_without_padding(mode, dtype):
    def step(table: jax.Array, at: jax.Array) -> Any:
        table = jnp.tanh(table)
        read = table.at[at].get(mode=mode if mode != "drop" else "fill", fill_value=7.0)
        written = table.at[at].add(read * 0 + 3.0, mode=mode if mode != "fill" else "drop")
        return written.sum(axis=0), written, read

    size = 125
    inside = [0, 3, 124]
    beyond = [] if mode == "promise_in_bounds" else [125, 126, 127]
    at = jnp.asarray([*inside, *beyond, -1 if dtype == "int8" else 5], dtype)
    with jax.enable_x64(True):
        args = drawn(size, 2), at
        got, count = run_padded(step, args, 16, 2.0)
        assert count >= 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), got, step(*args))


def test_what_a_padded_dim_is_reduced_by_does_not_count_its_padding():
    """Largest, least, all, any, sums and positions along the dim, and what takes the dim as it is."""

    def step(x: jax.Array, v: jax.Array, key: jax.Array) -> Any:
        y = jnp.log(x * x + 1e-3) - 5  # below 0 where x is 0, as in the padding
        z = jnp.exp(x) + 1.0
        noise = jax.random.normal(key, y.shape, y.dtype)
        return (
            y.max(0), z.min(0), (z > 0.5).all(0), (y > 9).any(0), y.sum(0), z.prod(0), y.argmax(0), jnp.cumsum(y, 0),
            jnp.sort(z, 0)[::-1], jax.lax.top_k(y.T, 3), (z / y).mean(), jnp.concatenate([y, z])[5:], noise * y,
            jnp.broadcast_to(v, (13, 5)).sum(0), jnp.broadcast_to(y[:, :1], (13, 5)) @ z[:5],
            (x.astype(jnp.int8).max(0), x.astype(jnp.int8).min(0)),
        )  # fmt: skip

    with jax.enable_x64(True):
        args = drawn(13, 5) - 3, drawn(5) + 9, jax.random.key_data(jax.random.key(0))
        got, count = run_padded(step, args, 8, 2.0)
        assert count >= 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), got, jax.jit(step)(*args))


def head(p: Any, x: jax.Array, labels: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        logits = x @ p
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    value, grad = jax.value_and_grad(loss)(p)
    return p - 0.1 * grad, value


def test_logits_of_an_uneven_vocabulary_are_split(tmp_path: Path):
    """Each device holds an eighth of the vocabulary's logits; a saved plan runs in its form unasked."""
    with jax.enable_x64(True):
        args = drawn(16, 4099), drawn(6, 16), jnp.arange(6) * 800
        run = autopar.parallelize(head, cluster=toy(8), **FREE)
        plain = autopar.parallelize(head, cluster=toy(8), padding=False, **FREE)
        step, by_whole = run.compile(*args), plain.compile(*args)
        want = jax.jit(head)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-13), step(*args), want)
        assert step.plan.step_time < 0.7 * by_whole.plan.step_time
        assert step.plan.stages[0].form.padded[0][2] == 4104
        assert any("padded to 4104" in note and "0.12%" in note for note in step.plan.content.notes)
        assert "f64[6,513]" in step.as_text()
        assert "f64[6,4099]" not in step.as_text()
        assert "f64[3,4099]" not in step.as_text()
        assert "f64[3,4099]" in by_whole.as_text()  # examples are split in two, the vocabulary is whole
        step.plan.save(tmp_path / "plan.json")
        again = autopar.parallelize(head, cluster=toy(8), plan=tmp_path / "plan.json")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-13), again(*args), want)
        assert again.plan(*args) == step.plan
        assert not by_whole.plan.stages[0].form.padded
        for leaf, sharding in zip(args, jax.tree.leaves(step.input_shardings), strict=True):
            assert isinstance(sharding, NamedSharding)
            assert sharding.shard_shape(leaf.shape)  # the user's sizes are kept, and split evenly or not at all


@pytest.mark.parametrize(
    ("size", "pieces", "waste", "want"),
    [(50257, 8, 0.34, 50264), (13, 8, 0.34, 16), (12, 8, 0.34, 16), (12, 64, 0.34, 16), (3, 8, 0.34, 4),
     (2, 8, 0.34, 2), (16, 8, 0.34, 16), (1, 8, 9.0, 1), (5, 8, 0.34, 6), (8, 64, 0.34, 8)],
)  # fmt: skip
def test_sizes_are_padded_as_far_as_waste_allows(size, pieces, waste, want):
    assert padded_size(size, pieces, waste) == want


def test_nothing_is_padded_where_the_padding_costs_more_than_it_saves():
    """A dim of 13 next to one that is split already: padding it would be waste alone."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    args = jax.ShapeDtypeStruct((13, 4096), jnp.float32), jax.ShapeDtypeStruct((8192, 13), jnp.float32)
    plan = autopar.parallelize(step, cluster=toy(8), **FREE).plan(*args)
    assert not plan.stages[0].form.padded


def test_the_batch_is_not_padded_where_microbatches_split_it():
    """Padding it would mix the examples of microbatches: all would run at once."""
    f32 = jax.ShapeDtypeStruct

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    args = f32((256, 256), "float32"), f32((12, 256), "float32")
    cluster = autopar.Cluster.load("dgx-a100")
    at_once, in_three = (
        autopar.parallelize(step, cluster=cluster, num_stages=1, num_microbatches=n, mesh_shape=(8,)).plan(*args)
        for n in (1, 3)
    )
    assert all(name != "x" for name, _, _ in in_three.stages[0].form.padded)
    assert in_three.num_microbatches == 3 and at_once.num_microbatches == 1
    assert any("scan" in o.id for o in in_three.content.operators)
