"""Steps with products in blocks: values and gradients, what is compiled, what plans say."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import AutoparError
from autopar.lower.hlo import collectives
from autopar.plan import Plan
from benchmarks.experts.compare import total_wire_bytes
from tests.search.problems import toy


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.3)


def perceptron(x: jax.Array, w1: jax.Array, w2: jax.Array) -> Any:
    """Two layers with all gradients."""

    def loss(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w1) @ w2) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w1, w2)


#: Tokens split between layers, columns and rows of the layers inside (sequence and tensor parallelism).
MEGATRON = {"x": P("d", "m", None), "w1": P(None, "m"), "w2": P("m", None)}
#: Examples and all weights split: weights are gathered, their gradients scattered (FSDP).
FSDP = {"x": P(("d", "m"), None, None), "w1": P("m", None), "w2": P("m", None)}


def planned(how: str, devices: int, constraints: Any, *args: Any) -> Any:
    """On eight devices, of which ``devices`` are along the axis m and the others along d."""
    return autopar.parallelize(
        perceptron,
        cluster=toy(8),
        num_stages=1,
        num_microbatches=1,
        mesh_shape=(8 // devices, devices),
        collective_matmul=how,
        constraints=constraints,
        mesh_axes={"d": 8 // devices, "m": devices},
    ).compile(*args)


def same(compiled: Any, *args: Any) -> None:
    expected = jax.jit(perceptron)(*args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), compiled(*args), expected)


def sent(compiled: Any) -> Counter[tuple[str, int]]:
    """Messages of the compiled program by kind and bytes, scalars left out."""
    found: Counter[tuple[str, int]] = Counter()
    for c in collectives(compiled.as_text()):
        if c.full_bytes > 8:
            found[c.kind, c.full_bytes] += round(c.times)
    return found


def test_sequence_and_tensor_parallelism() -> None:
    """Two gathers and two scatters of 8 kB are 7 messages of 1 kB each; none of them is left."""
    with jax.enable_x64(True):
        args = drawn(2, 16, 32), drawn(32, 64, seed=1), drawn(64, 32, seed=2)
        compiled = planned("always", 8, MEGATRON, *args)
        same(compiled, *args)
        assert sent(compiled) == {("collective-permute", 1024): 4 * 7}
        forms = Counter(o.collective_matmul for o in compiled.plan.content.operators if o.collective_matmul)
        assert forms == {"lhs": 2, "result": 2}
        assert any("2 of operands and 2 of sums" in note for note in compiled.plan.notes)
        assert Plan.from_json(compiled.plan.to_json()).content == compiled.plan.content


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("constraints", [MEGATRON, FSDP], ids=["megatron", "fsdp"])
def test_messages_have_the_bytes_of_the_collectives(devices: int, constraints: Any) -> None:
    """As many bytes leave a device as with gathers and scatters, and values are those of one device."""
    with jax.enable_x64(True):
        args = drawn(8, 16, 32), drawn(32, 64, seed=1), drawn(64, 32, seed=2)
        wire: dict[str, float] = {}
        for how in ("none", "always"):
            compiled = planned(how, devices, constraints, *args)
            same(compiled, *args)
            found = collectives(compiled.as_text())
            wire[how] = total_wire_bytes(found)
            assert any(o.collective_matmul for o in compiled.plan.content.operators) == (how == "always")
        assert wire["always"] == wire["none"]


def test_devices_that_do_not_compute_beside_messages_keep_collectives() -> None:
    """On CPU devices nothing overlaps: "auto" leaves all as it is, and so does no option."""
    args = drawn(2, 16, 32), drawn(32, 64, seed=1), drawn(64, 32, seed=2)
    parallel = [
        autopar.parallelize(perceptron, cluster=toy(8), num_stages=1, num_microbatches=1, **options)
        for options in ({}, {"collective_matmul": "auto"})
    ]
    plans = [p.plan(*args).to_json() for p in parallel]
    assert plans[0] == plans[1] and '"collective_matmul"' not in plans[0]


def test_a_word_that_is_no_way_is_refused() -> None:
    with pytest.raises(AutoparError, match="collective_matmul='ring' is not a way"):
        autopar.parallelize(perceptron, collective_matmul="ring")


@pytest.mark.slow
def test_a_transformer_with_tensor_and_sequence_parallelism() -> None:
    """Two layers of attention and perceptrons, all gradients, with products in blocks."""

    def step(p: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, w: Any) -> jax.Array:
            q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[n]) for n in "qkv")
            scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / 2
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            shares = jax.nn.softmax(jnp.where(mask, scores, -1e30))
            x = x + jnp.einsum("bhqk,bkhe,hed->bqd", shares, v, w["o"])
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.square(functools.reduce(layer, p, x)))

        return jax.value_and_grad(loss)(p)

    shapes = {"q": (32, 8, 4), "k": (32, 8, 4), "v": (32, 8, 4), "o": (8, 4, 32), "up": (32, 64), "down": (64, 32)}
    split = {"[qkv]": P(None, "m", None), "o": P("m", None, None), "up": P(None, "m"), "down": P("m", None)}
    with jax.enable_x64(True):
        p = [{n: drawn(*s, seed=i) for i, (n, s) in enumerate(shapes.items())} for _ in range(2)]
        x = drawn(2, 64, 32, seed=9)
        pins = {f"p[{i}]['{n}']": split["[qkv]" if n in "qkv" else n] for i in range(2) for n in shapes}
        compiled = autopar.parallelize(
            step,
            cluster=toy(8),
            num_stages=1,
            num_microbatches=1,
            mesh_shape=(8,),
            collective_matmul="always",
            attention="plain",
            constraints={**pins, "x": P(None, "m", None)},
            mesh_axes={"m": 8},
        ).compile(p, x)
        expected = jax.jit(step)(p, x)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), compiled(p, x), expected)
        forms = Counter(o.collective_matmul for o in compiled.plan.content.operators if o.collective_matmul)
        assert sum(forms.values()) >= 2
        assert any(kind == "collective-permute" for kind, _ in sent(compiled))
