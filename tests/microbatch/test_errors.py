"""What cannot be split says why, with the user's line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import MicrobatchError
from autopar.microbatch import analyze
from tests.microbatch.running import assert_same_in_microbatches, traced
from tests.microbatch.test_values import data, predict, sgd, step_of, weights


def batch_norm(params, b):
    h = b["x"] @ params["w"]
    mean = h.mean(0)
    return jnp.mean(((h - mean) @ params["v"] - b["y"]) ** 2), {}


def norm_inside(params, b):
    h = jnp.tanh(b["x"] @ params["w"])
    return jnp.mean(((h - h.mean(0)) @ params["w"].T) ** 2), {}


def contrastive(params, b):
    h = b["x"] @ params["w"]
    scores = h @ h.T
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(8), jnp.arange(8)]), {}


@pytest.mark.parametrize(("loss_fn", "text"), [(batch_norm, "h.mean(0)"), (contrastive, "h @ h.T")])
def test_mixed_examples_name_the_line(loss_fn, text):
    plain, _ = traced(step_of(loss_fn), (weights(), data()))
    lines, first = inspect.getsourcelines(loss_fn)
    line = first + next(i for i, found in enumerate(lines) if text in found)
    with pytest.raises(MicrobatchError, match=rf"test_errors\.py:{line}(:[0-9]+)? \({loss_fn.__name__}\)"):
        analyze(plain.graph, 2)


def test_one_microbatch_still_works():
    assert_same_in_microbatches(step_of(batch_norm), (weights(), data()), (1,), rtol=1e-6)


def test_a_count_that_does_not_divide_says_which_do():
    plain, _ = traced(step_of(batch_norm), (weights(), data()))
    with pytest.raises(MicrobatchError, match=r"3 microbatches do not divide the batch of 8(.|\n)*2, 4, 8"):
        analyze(plain.graph, 3)


def test_no_batch():
    def step(params):
        return sgd(params, jax.grad(lambda p: predict(p, jnp.ones((2, 4))).sum())(params))

    plain, _ = traced(step, (weights(),))
    with pytest.raises(MicrobatchError, match="no batch argument"):
        analyze(plain.graph, 2)


def test_errors_reach_the_user():
    fn = autopar.parallelize(step_of(norm_inside), num_microbatches=2, num_stages=2)
    with pytest.raises(MicrobatchError, match=r"test_errors\.py"):
        fn.plan(weights(), data())
    with pytest.raises(autopar.AutoparError, match=r"num_microbatches=0 is no count"):
        autopar.parallelize(step_of(batch_norm), num_microbatches=0)


def test_auto_takes_microbatches_where_memory_is_short():
    def step(params, batch):
        def loss_fn(p):
            h = batch["x"]
            for _ in range(6):
                h = jnp.tanh(h @ p["w"])
            return jnp.mean(h**2)

        return sgd(params, jax.grad(loss_fn)(params))

    args = {"w": jnp.ones((16, 16))}, {"x": np.ones((4096, 16), np.float32)}
    free = autopar.parallelize(step).plan(*args)
    short = autopar.parallelize(step, memory_limit=free.peak_memory // 3).plan(*args)
    assert free.num_microbatches == 1
    assert short.num_microbatches > 1
    assert short.peak_memory <= free.peak_memory // 3


@pytest.mark.parametrize("layers", [1, 16])
def test_a_metric_may_wait_where_the_model_does_most_of_the_work(layers):
    """Layers in a loop count in each iteration."""

    def loss_fn(params, b):
        h, _ = jax.lax.scan(lambda h, w: (h @ w, None), b["x"], params["layers"])
        scores = jax.nn.sigmoid(h @ h.T) @ h  # of the whole batch: half of what a layer computes, and more
        return jnp.mean(h**2), {"spread": jax.lax.stop_gradient(scores @ params["layers"][0]).sum()}

    def step(params, b):
        (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, b)
        return sgd(params, gradients), loss, metrics

    arguments = ({"layers": jnp.zeros((layers, 4, 4))}, {"x": jnp.ones((8, 4))})
    plain, _ = traced(step, arguments)
    assert {op.primitive for op in plain.graph.operators} >= {"scan", "dot_general"}
    if layers == 16:
        assert analyze(plain.graph, 2).count == 2
    else:
        with pytest.raises(MicrobatchError, match="needs the examples of all microbatches"):
            analyze(plain.graph, 2)


def test_a_dim_that_is_none_of_examples_is_no_second_try():
    """Rows of one matrix meet in its square at once: microbatches of rows would leave the loop empty."""

    def loss_fn(params, b):
        h = (b["x"] @ b["x"].mT) @ params["w"]
        return jnp.mean(jnp.tanh(h - h.mean(0)) ** 2), {}

    plain, _ = traced(step_of(loss_fn), ({"w": jnp.ones(4)}, {"x": jnp.ones((8, 4, 4))}))
    with pytest.raises(MicrobatchError, match=r"(?s)needs the examples of all microbatches.*test_errors\.py"):
        analyze(plain.graph, 2)
