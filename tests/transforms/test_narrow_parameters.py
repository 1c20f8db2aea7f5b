"""Passes that read rounded parameters: against gradients at the rounded parameters, applied by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.formats import WireFormat
from autopar.transforms import FORMATS, Format, narrow_parameters


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) - 0.3) ** 2)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_of_what_the_format_says(name):
    tx = optax.adam(0.01)
    params = {"w": jax.random.normal(jax.random.key(0), (24, 40)), "b": jnp.linspace(-1, 1, 40)}
    state, batch = {"params": params, "opt": tx.init(params)}, jax.random.normal(jax.random.key(1), (16, 24))

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    format = Format(name, 16)
    new, value = narrow_parameters(step, format)(state, batch)
    read = {"w": format.rounded(params["w"]), "b": params["b"]}
    assert (jnp.abs(read["w"] - params["w"]) <= format.bound(params["w"]) * 1.001 + 1e-7).all()
    want, grads = jax.value_and_grad(loss)(read, batch)
    updates, _ = tx.update(grads, state["opt"], params)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        new["params"], optax.apply_updates(params, updates),
    )  # fmt: skip


def test_what_wire_takes_is_a_format():
    params = {"w": jax.random.normal(jax.random.key(0), (24, 40)), "b": jnp.zeros(40)}

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    given = {"params": params}, jax.random.normal(jax.random.key(1), (16, 24))
    found, wanted = (narrow_parameters(step, kind("int4", 16))(*given) for kind in (WireFormat, Format))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_an_unknown_format_is_refused():
    with pytest.raises(autopar.AutoparError, match="int3"):
        narrow_parameters(loss, "int3")
