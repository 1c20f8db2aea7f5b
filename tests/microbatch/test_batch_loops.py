"""Loops that users write over parts of their batch: which there are, and steps in which all parts are side by side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.batch_loops import parts_side_by_side
from autopar.microbatch import loops_over_batch
from tests.microbatch.running import numbers, run, traced
from tests.search.problems import toy

PARTS, BATCH, WIDTH, LAYERS = 4, 8, 8, 3


def model(params, x):
    """The loss of examples, by layers that are written one by one."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def stacked(params, x):
    """The loss of examples, by a loop over layers."""
    y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params)
    return jnp.mean(y**2)


def sums(loss, params, parts):
    """Gradients that a loop adds up, and losses that it leaves."""

    def body(grads, part):
        value, grad = jax.value_and_grad(loss)(params, part)
        return jax.tree.map(jnp.add, grads, grad), value

    grads, values = lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: g / PARTS, grads), values.mean()


def carried(loss, params, parts):
    """Parameters that are carried along, terms that start at the regularizer's, and the number of each part."""

    def body(carry, numbered):
        kept, grads, total = carry
        number, part = numbered
        value, grad = jax.value_and_grad(loss)(kept, part * (1 + number / PARTS))
        return (kept, jax.tree.map(lambda a, b: a + b / PARTS, grads, grad), total + value), None

    start = jax.tree.map(lambda w: 1e-2 * w, params)
    (_, grads, total), _ = lax.scan(body, (params, start, 0.0), (jnp.arange(PARTS), parts))
    return grads, total / PARTS


def mapped(loss, params, parts):
    """Gradients of each part, by `jax.lax.map`."""
    values, grads = lax.map(lambda part: jax.value_and_grad(loss)(params, part), parts)
    return jax.tree.map(lambda g: g.mean(0), grads), values.mean()


def numbered(loss, params, parts):
    """Gradients that a loop adds up which reads each part by its number."""

    def body(i, carry):
        grads, total = carry
        value, grad = jax.value_and_grad(loss)(params, parts[i] * (1 + i / PARTS))
        return jax.tree.map(jnp.add, grads, grad), total + value / PARTS

    return lax.fori_loop(0, PARTS, body, (jax.tree.map(jnp.zeros_like, params), 0.0))


def written_out(loss, params, parts):
    """Gradients that a loop of Python adds up."""
    grads, total = jax.tree.map(jnp.zeros_like, params), 0.0
    for part in parts:
        value, grad = jax.value_and_grad(loss)(params, part)
        grads, total = jax.tree.map(jnp.add, grads, grad), total + value
    return jax.tree.map(lambda g: g / PARTS, grads), total / PARTS


def listed(loss, params, parts):
    """Gradients of parts in a list, of which the first two are added first; the losses are a stack."""
    both = [jax.value_and_grad(loss)(params, parts[k]) for k in range(PARTS)]
    grads = both[0][1]
    for _, grad in both[1:]:
        grads = jax.tree.map(jnp.add, grads, grad)
    return grads, jnp.stack([value for value, _ in both]).mean()


def differentiated(loss, params, parts):
    """The gradient of a loss that is a loop over parts."""
    value, grads = jax.value_and_grad(lambda p: lax.map(jax.checkpoint(lambda part: loss(p, part)), parts).mean())(
        params
    )
    return grads, value


FORMS = {form.__name__: form for form in (sums, carried, mapped, numbered, written_out, listed, differentiated)}


def case(form, loss, of_parts=False):
    """A step and its arguments; the batch has a dim of parts already if asked."""

    def step(params, batch):
        parts = batch if of_parts else batch.reshape(PARTS, -1, WIDTH)
        grads, value = form(loss, params, parts)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    weights = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)) / 3
    shape = (PARTS, BATCH // PARTS, WIDTH) if of_parts else (BATCH, WIDTH)
    batch = np.random.default_rng(1).normal(size=shape)
    return step, (weights if loss is stacked else list(weights), batch)


@pytest.mark.few(7)
@pytest.mark.parametrize("loss", [model, stacked])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parts_side_by_side_give_what_the_loop_gives(x64, form, loss):
    step, args = case(form, loss)
    whole, leaves = traced(step, args)
    apart = parts_side_by_side(whole)
    assert bool(loops_over_batch(whole.graph)) == (form not in (written_out, listed))
    assert apart is not whole and parts_side_by_side(apart) is apart
    for got, want in zip(run(apart, leaves), run(whole, leaves), strict=True):
        np.testing.assert_allclose(numbers(got), numbers(want), rtol=1e-12, atol=1e-14)


def test_loops_that_go_over_something_else_stay(x64):
    """A loop over layers, a loop over time whose iterations need each other, and one that does little."""

    def step(w, batch):
        def loss(w):
            y, _ = lax.scan(lambda y, m: (jnp.tanh(y @ m), None), batch, w)
            z, _ = lax.scan(lambda z, row: (z * 0.9 + row, None), y[0], y)
            return (z**2).sum() + lax.map(lambda row: row.sum(), y).sum()

        return w - jax.grad(loss)(w)

    whole, _ = traced(step, (np.ones((LAYERS, WIDTH, WIDTH)), np.ones((BATCH, WIDTH))))
    assert parts_side_by_side(whole) is whole


def beyond(loss, params, parts):
    """Parts are rows of the batch, of which the last is read from beyond the end: there the last rows are read."""
    rows = parts.reshape(-1, WIDTH)
    size = rows.shape[0] // PARTS
    starts = [k * size for k in range(PARTS - 1)] + [PARTS * size]
    grads = [jax.grad(loss)(params, lax.dynamic_slice_in_dim(rows, start, size)) for start in starts]
    return jax.tree.map(lambda *g: sum(g) / PARTS, *grads), 0.0


def counted_down(loss, params, parts):
    """The loop goes over parts from the last one on, and counts from zero."""

    def body(carry, part):
        number, grads = carry
        return (number + 1, jax.tree.map(jnp.add, grads, jax.grad(loss)(params, part * number))), None

    start = 0, jax.tree.map(jnp.zeros_like, params)
    return lax.scan(body, start, parts, reverse=True)[0][1], 0.0


@pytest.mark.parametrize("form", [beyond, counted_down])
def test_parts_that_are_taken_in_another_order_stay(x64, form):
    step, args = case(form, model)
    whole, leaves = traced(step, args)
    apart = parts_side_by_side(whole)
    for got, want in zip(run(apart, leaves), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(numbers(got), numbers(want), rtol=1e-12, atol=1e-14)


def assert_in_stages(form, loss, of_parts=False, microbatches="auto"):
    """Two stages give the values of one device."""
    step, args = case(form, loss, of_parts)
    run = autopar.parallelize(step, num_stages=2, num_microbatches=microbatches, progress=False)
    got, want = run(*args), jax.jit(step)(*args)
    assert run.plans()[-1].num_stages == 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-12)


def test_accumulation_of_users_is_planned_in_two_stages(x64):
    step, args = case(sums, model)
    plan = autopar.parallelize(step, cluster=toy(2), num_stages=2, num_microbatches=PARTS).plan(*args)
    assert (plan.num_stages, plan.num_microbatches) == (2, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("of_parts", [False, True])
@pytest.mark.parametrize("microbatches", ["auto", 2, PARTS])
@pytest.mark.parametrize("loss", [model, stacked])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_accumulations_of_users_in_two_stages(x64, form, loss, microbatches, of_parts):
    assert_in_stages(form, loss, of_parts, microbatches)
