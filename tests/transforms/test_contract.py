"""What holds of every transform: the kind of its state, that it goes with other libraries, that the docs have it."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import transforms
from tests.api.steps import batch, loss_fn, params, sgd

DOCS = Path(__file__).resolve().parents[2] / "docs" / "transforms.md"
STEPS = {
    "delayed": lambda: transforms.delayed(sgd, params=""),
    "local_sgd": lambda: transforms.local_sgd(sgd, 2, 2, params=""),
    "diloco": lambda: transforms.diloco(sgd, 2, 2, params="", streaming=transforms.Streaming(2, 1), format="int8"),
}
GRADIENTS = {
    "powersgd": lambda: transforms.powersgd(1, 2, min_compression=1.0),
    "one_bit_adam": lambda: transforms.one_bit_adam(0.001, 2, 3),
    "narrow_mean": lambda: transforms.narrow_mean("int8", 2, seed=0),
}


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: tree))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_the_kind_of_its_state_and_gives_the_plain_one_back(name):
    step = STEPS[name]()
    state = step.init(params())
    for leaf in jax.tree.leaves(params()):
        assert all(leaf is not other for other in jax.tree.leaves(state))
    after = state
    for seed in range(3):
        after, _ = jax.jit(step)(after, batch(seed=seed))
    assert shapes(after) == shapes(state)
    assert shapes(step.drain(after)) == shapes(params())
    assert not np.array_equal(step.drain(after)["w"], params()["w"])


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_transformation_goes_into_a_chain(name):
    tx = optax.chain(GRADIENTS[name](), optax.identity() if name == "one_bit_adam" else optax.sgd(0.1))
    grads = transforms.per_replica_value_and_grad(loss_fn, 2)

    def step(state, data):
        p, opt = state
        values, g = grads(p, data["x"], data["y"])
        updates, opt = tx.update(g, opt, p)
        return (optax.apply_updates(p, updates), opt), jnp.mean(values)

    state = (params(), tx.init(params()))
    after, first = jax.jit(step)(state, batch())
    for _ in range(5):
        after, last = jax.jit(step)(after, batch())
    assert shapes(after) == shapes(state)
    assert last < first


def test_all_public_names_are_in_the_docs():
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in transforms.__all__ if not re.search(rf"\b{name}\b", text)] == []
    assert autopar.transforms is transforms
