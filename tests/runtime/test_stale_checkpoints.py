"""Checkpoints of pipelines without a flush: what is under way goes on after them, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.runtime.stale_models import MODELS, step_of
from tests.runtime.test_stale import slow

STAGES, MICROBATCHES = 2, 4


def stepped(model="perceptron"):
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    batches = [make(jax.random.key(100 + n), 4 * MICROBATCHES) for n in range(4)]
    return step_of(loss, tx), state, batches


def decorated(step, schedule):
    return autopar.parallelize(
        step, schedule=schedule, num_stages=STAGES, num_microbatches=MICROBATCHES, cluster=slow()
    )


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_state_that_is_restored_goes_on_as_if_it_had_not_been_saved(schedule, tmp_path):
    fn, state, batches = stepped()
    step = decorated(fn, schedule)
    for n, batch in enumerate(batches):
        state, _ = step(state, batch)
        if n == 1:
            saved = state
            step.save(str(tmp_path), state, wait=True)
    want = step.drain(state)
    compiled = decorated(fn, schedule)
    compiled.compile(*shapes((saved.state, batches[0])))
    new = decorated(fn, schedule)
    ways = {
        "the same function": (step, step.restore(str(tmp_path))),
        "compiled for shapes": (compiled, compiled.restore(str(tmp_path))),
        "like a state": (new, new.restore(str(tmp_path), like=saved)),
        "like shapes": (new, new.restore(str(tmp_path), like=shapes(saved))),
        "numpy": (new, jax.tree.map(np.asarray, saved)),
        "numpy of a restored one": (step, jax.tree.map(np.asarray, step.restore(str(tmp_path)))),
    }
    for way, (function, restored) in ways.items():
        assert type(restored) is type(saved), way
        assert_same(restored, saved)
        assert_same(function.drain(restored), step.drain(saved)) if function is step else None
        for batch in batches[2:]:
            restored, _ = function(restored, batch)
        assert_same(function.drain(restored), want)


@pytest.mark.usefixtures("x64")
def test_a_state_that_was_drained_is_restored_as_the_plain_one(tmp_path):
    fn, state, batches = stepped()
    step = decorated(fn, "2bw")
    state, _ = step(state, batches[0])
    plain = step.drain(state)
    step.save(str(tmp_path), plain, wait=True)
    assert_same(step.restore(str(tmp_path)), plain)
