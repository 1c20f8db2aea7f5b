"""`read_by_products`: whose readers take no more bits than the multipliers of a device."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.readers import read_by_products

X, W, STACK = jnp.ones((8, 4)), jnp.ones((4, 4)), jnp.ones((3, 4, 4))


def product(x, w):
    return x @ w


def two_products(x, w):
    return (x @ w) @ w.T


def reshaped(x, w):
    return x @ w.reshape(2, 2, 4).reshape(4, 4)


def convolved(x, w):
    return jax.lax.conv(x[None, None], w.reshape(1, 1, 4, 4), (1, 1), "SAME")


def in_loop(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)[0]


def precise(x, w):
    return jnp.matmul(x, w, precision="highest")


def with_algorithm(x, w):
    return jnp.matmul(x, w, precision=jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32))


def added_too(x, w):
    return x @ w + w.sum(0)


def function_of_it(x, w):
    return x @ jnp.tanh(w)


def returned(x, w):
    return x @ w, w


def unread(x, w):
    return x * 2.0


def names(step, *args, phase="forward"):
    graph = autopar.parallelize(step).trace(*args).graph
    return {i.name: i.name in read_by_products(graph, phase=phase) for i in graph.inputs}


@pytest.mark.parametrize("step", [product, two_products, reshaped, convolved, in_loop])
def test_products_alone(step) -> None:
    assert names(step, X, W)["w"]


@pytest.mark.parametrize("step", [precise, with_algorithm, added_too, function_of_it, returned, unread])
def test_other_readers(step) -> None:
    assert not names(step, X, W)["w"]


def test_other_dtypes_are_as_they_are() -> None:
    assert not names(product, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))["w"]


def test_slices_of_a_stack_and_the_stack() -> None:
    def layers(x, stack):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]

    graph = autopar.parallelize(layers).trace(X, STACK).graph
    keys = read_by_products(graph, phase="forward")
    (loop,) = (op for op in graph.operators if op.primitive == "scan")
    assert {f"{loop.id}/body/{loop.region('body').inputs[-1].name}", "stack"} <= keys
    assert f"{loop.id}/body/{loop.region('body').inputs[0].name}" in keys  # the carry of one iteration
    assert "x" not in keys  # a loop returns what it carries


def test_updates_take_what_is_stored() -> None:
    def train(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * gradient, loss

    assert names(train, W, X, phase="update")["w"]
    assert not names(train, W, X, phase="forward")["w"]
