"""The core of attention is found in passes forward and backward, and nothing else is taken for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.attention import attention_cores
from tests.search.problems import f32, graph_of


def attend(q, k, v, causal):
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / 4.0
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def products(graph, cores):
    return [op.id in cores for op in graph.operators if op.primitive == "dot_general"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [16, 24])  # with 16 scores are of the size of queries
def test_a_forward_pass_has_two_products_of_it(causal, tokens):
    def layer(w, x):
        q, k, v = (jnp.reshape(x @ w[n], (2, tokens, 4, 16)) for n in range(3))
        return jnp.reshape(attend(q, k, v, causal), (2, tokens, 64)) @ w[3]

    graph = graph_of(layer, f32(4, 64, 64), f32(2, tokens, 64))
    cores = attention_cores(graph)
    assert products(graph, cores) == [False, False, False, True, True, False]
    assert set(cores.values()) == {causal}
    inside = {op.primitive for op in graph.operators if op.id in cores}
    assert {"exp", "reduce_max", "reduce_sum"} <= inside


def test_a_backward_pass_has_four_more():
    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, True) ** 2)

    graph = graph_of(jax.grad(loss, argnums=(0, 1, 2)), *[f32(2, 24, 4, 16)] * 3)
    assert products(graph, attention_cores(graph)) == [True] * 6


def test_experts_are_none():
    def experts(x, up, down):
        return jnp.sum(jnp.einsum("ecf,efh->ech", jax.nn.gelu(jnp.einsum("ech,ehf->ecf", x, up)), down) ** 2)

    graph = graph_of(jax.grad(experts, argnums=(1, 2)), f32(4, 8, 16), f32(4, 16, 32), f32(4, 32, 16))
    assert attention_cores(graph) == {}


def test_a_mask_that_data_decides_leaves_nothing_out():
    def layer(q, k, v, lengths):
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k)
        seen = jnp.arange(24)[None, None, None, :] < lengths[:, None, None, None]
        return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)

    graph = graph_of(layer, *[f32(2, 24, 4, 16)] * 3, jax.ShapeDtypeStruct((2,), jnp.int32))
    cores = attention_cores(graph)
    assert products(graph, cores) == [True, True] and not any(cores.values())
