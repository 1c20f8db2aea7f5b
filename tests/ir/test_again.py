"""Operators that recomputation leaves out, of layers that are recomputed whole and in part, unrolled and in a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.ir.state_flow import StateFlow
from autopar.recompute.run_once import run_once
from tests.search.problems import f32, problem_of

LAYERS, WIDTH, INNER = 3, 8, 24
WEIGHTS = {"up": f32(LAYERS, WIDTH, INNER), "down": f32(LAYERS, INNER, WIDTH), "bias": f32(LAYERS, WIDTH)}
HEAD = f32(WIDTH, 5)


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"]


def middle(x, w):
    """Recomputes between the two products alone."""
    return x + jax.checkpoint(lambda y: jnp.tanh(y) * 2.0)(x @ w["up"]) @ w["down"] + w["bias"]


def step(one_layer, looped):
    def loss(weights, head, x):
        if looped:
            x, _ = jax.lax.scan(lambda x, w: (one_layer(x, w), None), x, weights)
        else:
            for n in range(LAYERS):
                x = one_layer(x, jax.tree.map(lambda w, n=n: w[n], weights))
        return jnp.sum(jnp.exp(x @ head))

    def train(weights, head, x):
        grads = jax.grad(loss, argnums=(0, 1))(weights, head, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, (weights, head), grads)

    return problem_of(train, (WEIGHTS, HEAD, f32(16, WIDTH)), Cluster.load("dgx-a100").part(0, 1)).graph


def products(graph, keys):
    """Operand shapes of the products among some keys."""
    found = []

    def visit(at, prefix):
        for op in at.operators:
            if op.primitive == "dot_general" and prefix + op.id in keys:
                found.append(tuple(t.shape for t in at.operand_types(op)))
            for name, region in op.regions:
                visit(region, f"{prefix}{op.id}/{name}/")

    visit(graph, "")
    return found


@pytest.mark.parametrize("looped", [False, True], ids=["unrolled", "looped"])
def test_the_last_product_of_a_recomputed_layer_is_left_out(looped):
    graph = step(jax.checkpoint(layer), looped)
    left = products(graph, run_once(graph))
    assert left == [((16, INNER), (INNER, WIDTH))] * (1 if looped else LAYERS)


@pytest.mark.parametrize("looped", [False, True], ids=["unrolled", "looped"])
def test_nothing_is_left_out_where_nothing_is_recomputed_or_all_of_it_is_read(looped):
    assert not run_once(step(layer, looped))
    graph = step(middle, looped)
    assert not products(graph, run_once(graph))


@pytest.mark.parametrize("looped", [False, True], ids=["unrolled", "looped"])
def test_parameters_and_gradients_are_told_from_activations(looped):
    graph = step(jax.checkpoint(layer), looped)
    flow = StateFlow.of(graph)
    parameters, gradients = set(), set()

    def visit(at, prefix):
        for name, type in at.types.items():
            if prefix + name in flow.parameters:
                parameters.add(type.shape)
            if prefix + name in flow.gradients:
                gradients.add(type.shape)
        for op in at.operators:
            for name, region in op.regions:
                visit(region, f"{prefix}{op.id}/{name}/")

    visit(graph, "")
    activations = {(16, WIDTH), (16, INNER), (16, 5), ()}
    assert {(WIDTH, INNER), (INNER, WIDTH), (WIDTH, 5)} <= parameters and not parameters & activations
    assert {(WIDTH, INNER), (INNER, WIDTH), (WIDTH, 5)} <= gradients and not gradients & activations
