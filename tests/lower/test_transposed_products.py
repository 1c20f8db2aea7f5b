"""Products that a transposition alone reads: how they are found, and their programs and values on CPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.transposed_products import swapped, transposed_products
from tests.end_to_end.clusters import MIDDLE
from tests.search.problems import f32, graph_of

TOKENS = (16, 8)


def _gradient(x, y):
    return lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda x, y: _gradient(x, y).T, 1),
        (lambda x, y: _gradient(x, y), 0),
        (lambda x, y: (_gradient(x, y).T, _gradient(x, x).sum()), 1),  # two products, one of them transposed
        (lambda x, y: (z := _gradient(x, y), z.T), 0),  # somebody else reads it
        (lambda x, y: jnp.einsum("bsi,bsj->bij", x, y).swapaxes(1, 2), 0),  # a batch
        (lambda x, y: jnp.tensordot(x, y, ((1,), (1,))).transpose(2, 3, 0, 1), 1),
        (lambda x, y: jnp.tensordot(x, y, ((1,), (1,))).transpose(2, 0, 3, 1), 0),
    ],
)
def test_products_that_a_transposition_alone_reads(fn, found):
    graph = graph_of(fn, f32(*TOKENS, 4), f32(*TOKENS, 6))
    by_id = {op.id: op.primitive for op in graph.operators}
    pairs = transposed_products(graph)
    assert len(pairs) == found
    assert all((by_id[a], by_id[b]) == ("dot_general", "transpose") for a, b in pairs.items())


@pytest.mark.parametrize(
    ("precision", "swaps"),
    [(None, True), ("highest", True), (("highest", "default"), False), ("BF16_BF16_F32", False)],
)
def test_precisions_that_say_the_same_of_both_operands(precision, swaps):
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.tensordot(x, y, ((1,), (0,)), precision=precision))
    (product,) = (e for e in jaxpr(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns if e.primitive.name == "dot_general")
    params = swapped(product.params)
    assert (params is not None) == swaps
    if params is not None:
        assert params["dimension_numbers"] == (((0,), (1,)), ((), ()))


def _step(state, batch):
    def loss(s):
        hidden = jnp.tanh(batch["x"] @ s["up"])
        return ((hidden @ s["down"] - batch["x"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


@pytest.mark.parametrize("batch", [16, 64])
def test_no_gradient_of_a_weight_is_a_product_of_two_transposed_matrices(batch):
    rng = np.random.default_rng(0)
    state = {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in (("up", (12, 40)), ("down", (40, 12)))}
    given = {"x": jnp.asarray(rng.normal(size=(batch, 6, 12)), jnp.float32)}
    planned = autopar.parallelize(_step, cluster=MIDDLE, num_stages=1, num_microbatches=1)
    text = planned.compile(state, given).as_text()
    products = re.findall(r" dot\(.*", text)
    folded = [p for p in products if "lhs_contracting_dims={0}, rhs_contracting_dims={1}" in p]
    assert len(products) >= 4 and not folded, text
    for ours, theirs in zip(jax.tree.leaves(planned(state, given)), jax.tree.leaves(_step(state, given)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
