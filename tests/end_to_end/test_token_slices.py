"""Pipelines in slices of tokens: the same numbers as the undecorated step, and what cannot be cut says why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, ScheduleError, SliceError
from examples import gpt, llama

SMALL = {"dtype": "float64", "layers": 2, "hidden": 8, "heads": 4, "vocab": 16, "seq": 6, "batch": 4}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def assert_same(fn, step, args, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(fn(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.linalg.norm((a - b).ravel()) <= rtol * max(np.linalg.norm(b.ravel()), 1e-12)


def sliced(step, devices=8, **options):
    cluster = autopar.Cluster.local(jax.devices()[:devices])
    return autopar.parallelize(step, cluster=cluster, num_stages=2, **{"num_microbatches": 2, **options})


def test_slices_of_two_stages_are_planned():
    step, args = gpt.build(**SMALL)
    plan = sliced(step, devices=2, schedule="1f1b", token_slices=(3, 2, 1)).plan(*args)
    assert plan.content.pipeline.slice_lengths == (3, 2, 1)
    assert "2 stages, 2 microbatches, 1f1b, slices of 3, 2, 1 tokens" in str(plan)
    timeline = autopar.simulate(plan)
    assert timeline.step_time == pytest.approx(plan.step_time)


@pytest.mark.slow
def test_slices_of_two_stages():
    step, args = gpt.build(**SMALL)
    fn = sliced(step, schedule="1f1b", token_slices=(3, 2, 1))
    assert fn.plan(*args).content.pipeline.slice_lengths == (3, 2, 1)
    assert_same(fn, step, args)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "eager-1f1b"])
def test_schedules(schedule):
    step, args = gpt.build(**SMALL)
    assert_same(sliced(step, schedule=schedule, token_slices=2), step, args)


@pytest.mark.slow
def test_llama_and_saved_plans(tmp_path):
    # As many examples as devices: their dim is split, not that of tokens.
    sizes = {**{k: v for k, v in SMALL.items() if k != "layers"}, "batch": 16}
    step, args = llama.build(**sizes, kv_heads=2, unroll=True, remat=False)
    fn = sliced(step, token_slices=2)
    fn.plan(*args).save(tmp_path / "plan.json")
    assert_same(autopar.parallelize(step, plan=tmp_path / "plan.json"), step, args)


@pytest.mark.slow
def test_what_is_asked_for_is_checked():
    step, args = gpt.build(abstract=True, **SMALL)
    with pytest.raises(AutoparError, match="token_slices='some' is not a division"):
        autopar.parallelize(step, token_slices="some")
    with pytest.raises(SliceError, match="pass through a pipeline"):
        autopar.parallelize(step, token_slices=2, num_stages=1)
    with pytest.raises(SliceError, match="neither recomputed"):
        autopar.parallelize(step, token_slices=2, remat="full")
    with pytest.raises(ScheduleError, match="2bw takes no slices of tokens"):
        autopar.parallelize(step, token_slices=2, schedule="2bw")
    with pytest.raises(SliceError, match="are not a sequence of 6"):
        sliced(step, token_slices=(4, 4)).plan(*args)
    with pytest.raises(SliceError, match="cannot be cut into 7 slices"):
        sliced(step, token_slices=7).plan(*args)


def test_layers_in_a_loop_are_refused_with_the_line():
    step, args = gpt.build(abstract=True, **{**SMALL, "scan": True, "remat": True})
    with pytest.raises(SliceError, match=r"at: \S+\.py:[0-9]+"):
        sliced(step, devices=2, token_slices=2).plan(*args)


def in_a_table(form, x, table, tokens):
    """Embeddings with those of positions: GPT-2's, of which the model has more than a sequence."""
    match form:
        case "added":
            return x + table[:tokens][None]
        case "of one sequence":
            return x * table
        case "looked up":
            return x + jnp.take(table, jnp.arange(tokens), axis=0)
        case _:
            return x + jax.lax.dynamic_slice_in_dim(table, 0, tokens, 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["added", "of one sequence", "looked up", "cut"])
def test_embeddings_of_positions(form):
    tokens, hidden, vocab = 6, 8, 16
    draw = np.random.default_rng(0).normal
    shapes = {"e": (vocab, hidden), "pos": (tokens if form == "of one sequence" else 12, hidden), "o": (hidden, vocab)}
    params = {n: draw(size=s) for n, s in shapes.items()} | {"w": [draw(size=(hidden, hidden)) for _ in range(2)]}

    def loss(p, batch):
        x = in_a_table(form, p["e"][batch["t"]], p["pos"], tokens)
        for w in p["w"]:
            h = jnp.tanh(x @ w)
            scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), jnp.einsum("bqh,bkh->bqk", h, h), -1e30)
            x = x + jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores, -1), h)
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ p["o"]), batch["y"][..., None], -1).mean()

    def step(p, batch):
        value, g = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), value

    text = np.random.default_rng(1).integers(0, vocab, (16, tokens + 1))
    batch = {"t": text[:, :-1], "y": text[:, 1:]}
    assert_same(sliced(step, schedule="1f1b", token_slices=(4, 2)), step, (params, batch))
