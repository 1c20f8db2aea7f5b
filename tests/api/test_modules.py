"""Steps of flax users: NNX objects that a step changes in place, TrainState, Linen."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import autopar
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_same, assert_trees_same

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER, num_stages=1, num_microbatches=1)
X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, use_bias=False, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(self.layers[0](x)))
        return self.layers[1](jax.nn.relu(x))


def make():
    model = Model(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.few(1)
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_modules_are_changed_in_place(donate):
    ours, theirs = make(), make()
    f, plain = parallelize(step, donate_argnums=donate), nnx.jit(step)
    kernel = ours[0].layers[0].kernel
    for _ in range(3):
        assert_trees_same(f(*ours, X), plain(*theirs, X))
    assert ours[0].layers[0].kernel is kernel
    assert_trees_same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)), 1e-4)
    roles = {i.path: i.role for i in f.plan(*ours, X).content.inputs}
    assert roles["model.layers.0.kernel"] == "parameter"
    assert roles["optimizer.opt_state.0.mu.layers.0.kernel"] == "optimizer"
    assert roles["x"] == "batch"


def test_modules_that_share_and_come_back():
    def both(pair, x):
        a, b = pair
        a.kernel[...] = a.kernel[...] + 1.0
        return b, a(x), nnx.Linear(8, 4, rngs=nnx.Rngs(2))

    a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    start = np.asarray(a.kernel[...])
    same, y, new = parallelize(both)((a, a), X)
    assert same is a
    np.testing.assert_allclose(a.kernel[...], start + 1.0)
    np.testing.assert_allclose(y, a(X), rtol=1e-5)
    np.testing.assert_allclose(new.kernel[...], nnx.Linear(8, 4, rngs=nnx.Rngs(2)).kernel[...], rtol=1e-6)


@pytest.mark.slow
def test_a_mode_of_a_module_is_part_of_the_program():
    model, _ = make()
    f = parallelize(lambda m, x: m(x))
    model.eval()
    assert_trees_same(f(model, X), model(X))
    count = int(model.dropout.rngs.count[...])
    model.train()
    f(model, X)
    assert int(model.dropout.rngs.count[...]) == count + 1


def test_init_makes_modules_split():
    f = parallelize(step)
    model, optimizer = f.init(make)
    want, _ = make()
    assert_trees_same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(want)))
    kernel = model.layers[0].kernel[...]
    assert all(s.data.size == kernel.size // 8 for s in kernel.addressable_shards)
    f(model, optimizer, X)


def test_split_modules_as_pure_state():
    graph, state = nnx.split(Model(nnx.Rngs(0)), ...)

    def pure(graph, state, x):
        model = nnx.merge(graph, state)
        y = model(x)
        return y, nnx.state(model)

    got, want = parallelize(pure)(graph, state, X), jax.jit(pure)(graph, state, X)
    assert_trees_same(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(want[1]))
    assert_trees_same(got[0], want[0])


def test_train_state_of_linen():
    model = nn.Dense(8)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.adamw(1e-2))

    def train(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    f = assert_same(train, (state, X), steps=3, cluster=CLUSTER, rtol=1e-4)
    new, _ = f(state, X)
    assert isinstance(new, TrainState) and int(new.step) == 1 and new.tx is state.tx
    assert len(f._plain.compiled) <= 2


def test_variables_of_a_high_level_type_are_an_error_that_names_the_line():
    held = nnx.with_vars({"w": nnx.Param(jnp.ones((8, 8)))}, hijax=True)
    with pytest.raises(autopar.TraceError, match=r"(?s)AbstractVariable.*test_modules.py.*hijax=False"):
        parallelize(lambda x: x @ held["w"]).plan(X)
