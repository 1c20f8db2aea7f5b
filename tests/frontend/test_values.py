"""The graph computes what the function does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.frontend import SignatureOptions
from examples import gpt, mlp
from tests.frontend.reference import check, primitives

X = jnp.arange(12.0).reshape(3, 4) / 7 - 0.5
SQUARE = jnp.arange(9.0).reshape(3, 3) / 5 - 1


@jax.custom_jvp
def tripled(x):
    return x * 3


@tripled.defjvp
def _tripled_jvp(primals, tangents):
    return tripled(*primals), tangents[0] * 7


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, x), lambda x, g: (g * x,))


@jax.checkpoint
def block(x):
    return jnp.sin(jnp.sin(x) @ x)


def nested(x):
    inner = jax.jit(lambda y: jax.jit(jnp.cos)(y) + 1)
    return inner(x) * inner(x + 1)


FUNCTIONS = {
    "nested jit": nested,
    "custom jvp": lambda x: (tripled(x), jax.grad(lambda x: tripled(x).sum())(x)),
    "custom vjp": lambda x: (doubled(x), jax.grad(lambda x: doubled(x).sum())(x)),
    "relu and softmax": lambda x: jax.grad(lambda x: jax.nn.softmax(jax.nn.relu(x @ x)).sum())(x),
    "remat": lambda x: jax.value_and_grad(lambda x: block(x).sum())(x),
    "remat with a policy": jax.grad(
        lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x), policy=jax.checkpoint_policies.dots_saveable)(x).sum()
    ),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(3), x),
    "scan backwards": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x, reverse=True),
    "scan without rows": lambda x: lax.scan(lambda c, _: (c @ SQUARE, None), x, None, length=3)[0],
    "gradient of a scan": jax.grad(lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), None), x[0], x)[0].sum()),
    "map": lambda x: lax.map(lambda r: r * 2 + r.sum(), x),
    "fori_loop": lambda x: lax.fori_loop(0, 4, lambda i, c: c + i, x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * x), (0, x)),
    "while under vmap": jax.vmap(lambda r: lax.while_loop(lambda c: (c * c).sum() < 10, lambda c: c * 2 + 0.1, r)),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * SQUARE, x),
    "switch": lambda x: [lax.switch(i, [jnp.sin, jnp.cos, lambda x: x], x) for i in (x.sum().astype(int), 1, 9)],
    "cond under vmap": jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r)),
    "nested loops": lambda x: lax.scan(
        lambda c, r: (lax.cond(r.sum() > 0, lambda c: lax.fori_loop(0, 2, lambda i, c: c + r, c), lambda c: -c, c), c),
        x[0],
        x,
    ),
    "closed over arrays": lambda x: jax.jit(lambda y: y @ SQUARE)(x) + np.ones((3, 3), np.float32) * X[:, :3],
    "odd constants": lambda x: (
        x * jnp.inf,
        x * np.nan,
        -x.astype(jnp.bfloat16) * 2.5,
        (x + 1j) * (2 - 1j),
        x.astype(jnp.uint32) + jnp.uint32(2**32 - 1),
        x.astype(jnp.float8_e4m3fn),
        x > -jnp.inf,
        x.astype(jnp.float16) * 65504.0,
        x * 1e-45,
        x.astype(jnp.int4),
    ),
    "linear algebra": lambda x: jnp.linalg.solve(x + 3 * jnp.eye(3), x),
    "sort and gather": lambda x: (jnp.sort(x, 0), jnp.argsort(x[0]), x[jnp.array([2, 0])], x.at[1].set(0.0)),
    "reshape in another order": lambda x: lax.reshape(x, (3, 3), dimensions=(1, 0)) @ x,
    "nothing to do": lambda x: x.reshape(3, 3).astype(jnp.float32).T.T + jnp.array(x, copy=True) + lax.rev(x[:1], (0,)),
    "the same twice": lambda x: (jnp.sin(x) + jnp.sin(x), jnp.sum(x, 0), jnp.sum(x, 1), jnp.sum(x, 0)),
    "nearly the same": lambda x: (x * 0.0, x * -0.0, lax.pow(x * x, 2.0), lax.pow(x * x, 2), x.astype(int) * 2),
    "convolution": lambda x: jnp.convolve(x[0], x[1]),
    "results that are inputs": lambda x: (x, x, 1, 2.5, True),
    "einsum and cumulative": lambda x: (jnp.einsum("ij,kj->ik", x, x), jnp.cumsum(x, 1)),
    "associative scan": lambda x: lax.associative_scan(jnp.add, x),
}


@pytest.mark.few(23)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_array(name: str) -> None:
    found = check(FUNCTIONS[name], SQUARE)
    assert found.graph.outputs


@pytest.mark.slow
def test_random_numbers_of_typed_and_raw_keys() -> None:
    def draw(key, x):
        one, two = jax.random.split(key)
        return jax.random.normal(one, (3,)) + x, jax.random.bernoulli(two, 0.5, (4,)), one

    check(draw, jax.random.key(3), 1.5)
    check(draw, jax.random.PRNGKey(3), 1.5)
    check(lambda x: jax.random.uniform(jax.random.fold_in(jax.random.key(0), x), (2,)), 7)


def test_arguments_of_all_kinds() -> None:
    def fn(a, /, b, *rest, scale=2.0, mode="sum", **more):
        total = a["x"] * scale + b + sum(rest)
        return {"y": total * len(mode), "z": more.get("extra", 0), "none": None}

    more = {"mode": "mean", "extra": X}
    check(fn, {"x": X, "label": "text", "none": None}, 3, np.arange(4.0), jnp.float32(2), scale=0.5, **more)
    options = SignatureOptions(static_argnums=(1,), static_argnames=("mode", "scale"))
    found = check(fn, {"x": X}, 3, scale=0.5, mode="mean", options=options)
    assert [i.name for i in found.graph.inputs] == ["a['x']"]
    check(functools.partial(fn, scale=3.0), {"x": X}, True)


def test_64_bit_numbers(x64: None) -> None:
    found = check(lambda x, n: (x * n, x + 2**40, x * 1e-300), np.arange(3.0), 2**40)
    assert [str(i.type) for i in found.graph.inputs] == ["f64[3]", "i64[]"]


def test_64_bit_numpy_arguments_become_32_bit() -> None:
    found = check(lambda x, n, s: x * n + s, np.arange(3.0), np.arange(3), np.float64(2))
    assert [str(i.type) for i in found.graph.inputs] == ["f32[3]", "i32[3]", "f32[]"]


def test_python_numbers_stay_weak() -> None:
    half = jnp.ones(3, jnp.bfloat16)
    for number, dtype in ((2.0, "bf16"), (jnp.asarray(2.0), "bf16"), (np.float32(2.0), "f32"), (jnp.float32(2), "f32")):
        found = check(lambda a, b: a * b, half, number)
        assert found.graph.outputs[0].type.dtype == dtype


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, 0.9), optax.adamw(1e-3), optax.MultiSteps(optax.adam(1e-3), 2)])
def test_train_steps(optimizer) -> None:
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: ((jax.nn.gelu(batch @ p["w"]) @ p["v"]) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    params = {"w": SQUARE, "v": SQUARE.T}
    check(step, params, optimizer.init(params), SQUARE)


@pytest.mark.slow
@pytest.mark.parametrize("example", [mlp, gpt], ids=lambda e: e.__name__)
def test_examples(example) -> None:
    step, args = example.build(**({"layers": 1} if example is gpt else {}))
    found = check(step, *args)
    assert {i.role for i in found.graph.inputs} >= {"parameter", "optimizer", "batch"}


OPERATIONS = {
    "sin": jnp.sin,
    "matmul": lambda x: x @ x.T @ x,
    "transpose and back": lambda x: (x.T * 2).T,
    "softmax": jax.nn.softmax,
    "jit": jax.jit(lambda x: x * 2 + 1),
    "remat": jax.checkpoint(lambda x: jnp.tanh(x * x)),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1],
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.cos, lambda x: x, x),
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "normalize": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4), st.booleans())
def test_random_compositions_and_their_gradients(names: list[str], differentiate: bool) -> None:
    def forward(x):
        for name in names:
            x = OPERATIONS[name](x)
        return x

    found = check(jax.value_and_grad(lambda x: forward(x).sum()) if differentiate else forward, X)
    assert len(primitives(found)) >= len(names) - 1
