"""Cores of attention: what is recognized, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.blockwise import AttentionSpec, blockwise
from autopar.ir.blockwise.matches import EXPONENTIALS, GRADIENTS, OF_SCORES, PROBABILITIES, Terms
from autopar.ir.verify import verify
from tests.end_to_end.attentions import FORMS, train_step
from tests.search.problems import f32, graph_of

TOKENS = f32(2, 16, 4, 8)
IDS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def primitives(fn: Callable[..., Any], *args: Any, least: int = 1) -> list[str]:
    """Primitives of a function in blocks that hold scores, or attention."""
    rewritten = blockwise(graph_of(fn, *args), least)
    verify(rewritten.graph)
    large = [op for op in rewritten.graph.operators if any(v.type.shape.count(16) > 1 for v in op.results)]
    cores = [op for op in rewritten.graph.operators if op.id in rewritten.cores]
    return [op.primitive for op in (*cores, *large)]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_one_operator_a_pass_and_keeps_no_scores(form: str) -> None:
    found = primitives(train_step(FORMS[form]), TOKENS, TOKENS, TOKENS, IDS)
    again = ["attention"] * (form == "capped")  # its backward pass recomputes it
    assert found == [*again, "attention", "attention_backward"]
    assert primitives(FORMS[form], TOKENS, TOKENS, TOKENS, IDS) == ["attention"]


def test_attention_has_the_precision_of_its_scores() -> None:
    """Prices go by it (`autopar.cost.product_dtype`)."""
    with jax.default_matmul_precision("highest"):
        rewritten = blockwise(graph_of(train_step(FORMS["example"]), TOKENS, TOKENS, TOKENS, IDS), 1)
    cores = [op for op in rewritten.graph.operators if op.id in rewritten.cores]
    assert [op.attr("precision") for op in cores] == [("HIGHEST", "HIGHEST")] * 2


def test_groups_of_heads_share_keys() -> None:
    """`jax.nn.dot_product_attention` with 4 heads that ask and 2 of keys."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2)

    shared = f32(2, 16, 2, 8)
    assert primitives(jax.grad(attend, (0, 1, 2)), TOKENS, shared, shared) == ["attention", "attention_backward"]
    assert primitives(jax.grad(attend), TOKENS, shared, shared) == ["attention", "attention_backward"]


def weights(q: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))


def returned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Somebody looks at the probabilities."""
    p = weights(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), p


def thinned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """They are changed after they were normalized."""
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(weights(q, k) > 0.1, weights(q, k), 0.0), v)


def by_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The softmax is over those that ask, and the product over the keys."""
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def squared(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = weights(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", p * p, v)


def twice(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = weights(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v) + jnp.einsum("bhqk,bkhd->bqhd", p, v * v)


@pytest.mark.parametrize("fn", [returned, thinned, by_queries, squared, twice])
def test_what_is_something_else_stays_as_it_is(fn: Callable[..., Any]) -> None:
    assert "attention" not in primitives(fn, TOKENS, TOKENS, TOKENS)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.tree.leaves(fn(q, k, v))[0]))

    if fn is not returned:
        assert "attention" not in primitives(jax.grad(loss, (0, 1, 2)), TOKENS, TOKENS, TOKENS)


def test_a_bias_that_is_learned_needs_its_scores() -> None:
    def loss(bias: jax.Array, q: jax.Array) -> jax.Array:
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q) + bias)
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", p, q) ** 2)

    assert "attention" not in primitives(jax.grad(loss), f32(4, 16, 16), TOKENS)


def test_the_smallest_size_counts() -> None:
    """16 tokens have 256 scores a head."""
    step = train_step(FORMS["example"])
    assert "attention" in primitives(step, TOKENS, TOKENS, TOKENS, IDS, least=256)
    assert "attention" not in primitives(step, TOKENS, TOKENS, TOKENS, IDS, least=257)


def test_blocks_of_few_keys_where_there_are_many_rows() -> None:
    def keys(rows: int, count: int) -> int:
        spec = AttentionSpec(1, 0, ((0, 2), (1, 2), (1, 3)), ((0, 3), (0,)), (0, 1), (0, 1))
        return spec.block_keys(spec.sizes([(rows, 8), (count, 8), (count, 8)]))

    assert keys(1 << 10, 1 << 14) == 1 << 14
    assert keys(1 << 14, 1 << 14) == 1 << 10
    assert keys(1 << 20, 1 << 14) == 256
    assert keys(1 << 20, 1000) == 500  # halves of it are no more than 256


@given(st.integers(0, 3), st.integers(-3, 3), st.integers(1, 5))
def test_sums_over_keys(d: int, power: int, factor: int) -> None:
    """By numbers: exponentials 1, 2, 3 and gradients 5, -7, 2 of one row."""
    e, g = [1.0, 2.0, 3.0], [5.0, -7.0, 2.0]
    total = sum(e)
    mean = sum(x * y for x, y in zip(e, g, strict=True)) / total

    def value(terms: Terms, x: float, y: float) -> float:
        return sum(float(c) * x**a * total**b * y**c_ * mean**d_ for (a, b, c_, d_), c in terms.of)

    for base in (EXPONENTIALS, EXPONENTIALS.times(GRADIENTS), OF_SCORES, PROBABILITIES.plus(OF_SCORES, -1)):
        terms = base.times(Terms.one(l=power, d=d)).scaled(Fraction(factor))
        summed = terms.summed()
        assert summed is not None and all(p[0] == p[2] == 0 for p, _ in summed.of)
        by_key = sum(value(terms, x, y) for x, y in zip(e, g, strict=True))
        assert abs(value(summed, 0.0, 0.0) - by_key) <= 1e-9 * (1 + abs(by_key))


def test_gradients_of_scores_add_up_to_nothing() -> None:
    """So what goes through the largest score, taken off all of a row, is zero."""
    assert OF_SCORES.summed() == Terms()
    assert GRADIENTS.summed() is None
