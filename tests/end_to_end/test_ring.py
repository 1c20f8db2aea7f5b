"""Attention in blocks on eight devices: values, what travels, memory, and when it is chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.lower.hlo import collectives
from examples._common import causal_attention
from tests.end_to_end.attentions import CAUSAL, FORMS, MORE, train_step
from tests.end_to_end.test_update_in_backward import bytes_used
from tests.end_to_end.test_update_in_backward import compiled as compiled_alone
from tests.search.problems import f32, toy
from tests.versions import KNOWN_JAX


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def arguments(batch: int, heads: int, tokens: int = 16) -> tuple[jax.Array, ...]:
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 3, (batch, tokens)))
    return (*(drawn(batch, tokens, heads, 4, seed=n) for n in range(3)), ids)


def parallel(fn: Callable[..., Any], **options: Any) -> Any:
    given = {"cluster": toy(8), "num_stages": 1, "num_microbatches": 1, "attention": "blocks", **options}
    return parallelize_with(fn, ParallelOptions(**given))


def same(fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """The compiled step, which has the values of ``fn``."""
    compiled = parallel(fn, **options).compile(*args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), compiled(*args), jax.jit(fn)(*args))
    return compiled


def asked(compiled: Any) -> Counter[int]:
    """Collective-permutes of a plan by bytes."""
    found: Counter[int] = Counter()
    for c in compiled.plan.communication:
        if c.kind == "collective-permute":
            found[c.bytes] += round(c.count)
    return found


def dealt(piece: int, row: int) -> Counter[int]:
    """Messages that deal the tokens of a causal forward and backward pass out to a ring, and bring results home.

    Forward queries, keys, values and the result with its logarithms; backward queries, keys, values, the gradient of
    the result, logarithms and the product of result and gradient, and three gradients: two halves of each.

    Args:
        piece: bytes of a shard of queries.
        row: bytes of one number for each of its tokens.
    """
    return Counter({piece // 2: 2 * (4 + 7), row // 2: 2 * (1 + 2)})


def sent(compiled: Any) -> Counter[int]:
    """Collective-permutes of a compiled program by bytes."""
    found: Counter[int] = Counter()
    for c in collectives(compiled.as_text()):
        if c.kind == "collective-permute":
            found[c.full_bytes] += round(c.times)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_on_a_ring_of_eight(form: str) -> None:
    """Keys and values take 7 messages forward and 7 backward, their gradients 8; no other collective has a piece.

    What `jax.checkpoint` recomputes is planned with the 14 messages of the forward pass once more; XLA's compiler for
    CPUs drops the barriers in between, and does both at once. Causal forms deal their tokens out.
    """
    with jax.enable_x64(True):
        compiled = same(train_step(FORMS[form]), arguments(1, 1), mesh_shape=(8,))
        piece = 2 * 4 * 8  # two tokens of four float64
        count = 2 * 7 + 2 * 7 + 2 * 8
        most = count + 14 * (form == "capped")
        halves = dealt(piece, 2 * 8) if form in CAUSAL else Counter()
        wanted = [Counter({piece: n}) + halves for n in ([count] if KNOWN_JAX else [count, most])]
        assert sent(compiled) in wanted
        assert asked(compiled) == Counter({piece: most}) + halves
        assert all(c.kind == "collective-permute" for c in compiled.plan.communication if c.bytes >= piece)


def products_flops(compiled: Any) -> float:
    """FLOPs of a compiled program, nearly all of products."""
    analysis = compiled.cost_analysis()
    return float((analysis[0] if isinstance(analysis, list) else analysis)["flops"])


@pytest.mark.parametrize(("batch", "share"), [(1, 17 / 32), (8, 3 / 4)])
def test_scores_that_the_mask_leaves_empty_are_not_made(batch: int, share: float) -> None:
    """Of the 4n products of halves of a ring of n devices 2n + 1 are in the program, of a device alone 3 of 4."""
    shapes = (*((f32(batch, 512, 1, 256),) * 3), jax.ShapeDtypeStruct((batch, 512), jnp.int32))
    options: dict[str, Any] = {"mesh_shape": (8,), "cluster": toy(8, bandwidth=1e9 if batch == 1 else 1e6)}
    compiled = [parallel(train_step(f), **options).compile(*shapes) for f in (FORMS["by_hand"], MORE["whole"])]
    assert all(bool(sent(c)) == (batch == 1) for c in compiled)
    flops = [products_flops(c) for c in compiled]
    assert 0.97 * share < flops[0] / flops[1] < 1.1 * share


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("form", "mesh", "tokens"),
    [("grouped", (8,), 48), ("grouped", (8,), 24), ("windowed", (8,), 16), ("windowed", (4, 2), 48)],
)
def test_halves_of_a_ring(form: str, mesh: tuple[int, ...], tokens: int) -> None:
    """Groups of heads, segments, windows, and an odd number of tokens a device, which has no halves."""
    with jax.enable_x64(True):
        compiled = same(train_step(MORE[form]), arguments(1, 2, tokens), mesh_shape=mesh)
        found = [r for r in compiled.plan.content.operators if "attention" in r.id.rpartition("/")[2]]
        assert all("x" in r.operands[0] for r in found)
        assert [r.skips_masked for r in found] == [tokens != 24] * 2
        assert not sent(compiled) - asked(compiled)  # XLA sends segments once for both passes
        if form == "grouped":
            assert sent(compiled) == asked(compiled)


def test_heads_on_one_axis_and_a_ring_on_the_other() -> None:
    """Ulysses and ring together: tokens are dealt to heads by all-to-all, or heads are split from the start."""
    with jax.enable_x64(True):
        compiled = same(train_step(FORMS["example"]), arguments(1, 2), mesh_shape=(2, 4))
        layouts = {r.id.rpartition("/")[2]: r.operands[:3] for r in compiled.plan.content.operators}
        assert layouts["attention.0"] == ("[.,y,x,.]",) * 3
        piece = 4 * 4 * 8
        assert sent(compiled) == Counter({piece: 2 * 3 + 2 * 3 + 2 * 4}) + dealt(piece, 4 * 8)


@pytest.mark.slow
def test_tokens_come_to_heads_by_all_to_all() -> None:
    """Ulysses: with as many heads as devices and tokens split outside, no key travels."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        q = jnp.einsum("btd,ndhe->nbthe", jnp.tanh(x), w)
        return jnp.tanh(jax.nn.relu(causal_attention(*q)).reshape(x.shape))

    with jax.enable_x64(True):
        args = drawn(1, 32, 32), drawn(3, 32, 8, 4)
        constraints = {"x": (1,)}
        compiled = same(step, args, mesh_shape=(8,), constraints=autopar.api.constraints.parse_pins(constraints, None))
        kinds = {c.kind for c in compiled.plan.communication}
        assert "all-to-all" in kinds and "collective-permute" not in kinds


def scanned(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """Layers in a loop, each recomputed, in a step of SGD."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, w[n]) for n in range(3))
        return h + causal_attention(q, k, v).reshape(h.shape), None

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_layers_in_a_loop(count: int) -> None:
    with jax.enable_x64(True):
        args = {"layers": drawn(2, 3, 8, 2, 4)}, drawn(2, 16, 8)
        compiled = same(scanned, args, mesh_shape=(8,), num_microbatches=count, batch_argnums=(1,))
        assert any("/attention.0" in r.id for r in compiled.plan.content.operators)
        assert sum(sent(compiled).values()) > 0


@pytest.mark.slow
def test_a_plan_in_blocks_is_saved_and_runs_again() -> None:
    with jax.enable_x64(True):
        step, args = train_step(FORMS["example"]), arguments(1, 1)
        plan = parallel(step, mesh_shape=(8,)).plan(*args)
        again = autopar.Plan.from_json(plan.to_json())
        assert again == plan and again.stages[0].form.block_scores == 1
        assert any("blocks" in note for note in again.notes)
        got = autopar.parallelize(step, plan=again)(*args)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-10, 1e-10), got, jax.jit(step)(*args))


def test_long_sequences_are_planned_both_ways_and_short_ones_are_not() -> None:
    """Of 16k tokens the scores of one head are 1 GB: the plain form does not fit, blocks do unless they are off."""
    step = train_step(FORMS["example"])

    def shapes(tokens: int) -> tuple[Any, ...]:
        return (*((f32(1, tokens, 1, 16),) * 3), jax.ShapeDtypeStruct((1, tokens), jnp.int32))

    one = toy(1)
    plan = parallel(step, cluster=one, attention="auto").plan(*shapes(16384))
    assert plan.stages[0].form.block_scores and plan.peak_memory < 10**9
    with pytest.raises(InfeasiblePlanError):
        parallel(step, cluster=one, attention="plain").plan(*shapes(16384))
    assert not parallel(step, cluster=one, attention="auto").plan(*shapes(2048)).stages[0].form.block_scores
    with pytest.raises(AutoparError, match="is not a form of attention"):
        parallel(step, attention="ring")


def layer_step(weights: dict[str, jax.Array], x: jax.Array) -> Any:
    """One layer of attention, a step of SGD."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[n]) for n in "qkv")
        return jnp.mean((x + jnp.einsum("bthe,hed->btd", causal_attention(q, k, v), w["o"])) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads), value


@pytest.mark.slow
def test_128k_tokens_on_eight_devices_take_the_memory_of_16k_on_one() -> None:
    """Compiled, on shapes alone. Plain, 16k tokens take 6.5 GB."""
    heads, dims, width = 2, 32, 64
    weights = {**{n: f32(width, heads, dims) for n in "qkv"}, "o": f32(heads, dims, width)}
    compiled = parallel(layer_step).compile(weights, f32(1, 131072, width))
    used = bytes_used(compiled)
    short = weights, f32(1, 16384, width)
    alone, _ = compiled_alone(layer_step, parallel(layer_step, cluster=toy(1)).plan(*short), short)
    assert used <= 1.2 * bytes_used(alone)
    # 7.1%: products whose operands are swapped on CPUs copy one of them, 4 MB, which is not planned.
    assert abs(used - compiled.plan.peak_memory) <= 0.08 * used
    # Each of n devices of the ring has an n-th of the tokens, of one head or both.
    rings = [c for c in compiled.plan.communication if c.kind == "collective-permute"]
    ring = max(rings, key=lambda c: c.bytes)
    shape = compiled.plan.stages[0].mesh_shape
    devices = math.prod(shape[axis] for axis in ring.axis.split("+"))
    piece = 131072 // devices * dims * 4 * heads // (8 // devices)
    around = Counter({piece: 2 * (devices - 1) * 2 + 2 * devices})
    assert sent(compiled) == around + dealt(piece, piece // dims)
