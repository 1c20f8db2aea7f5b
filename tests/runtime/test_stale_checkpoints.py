"""Checkpoints of pipelines without a flush: what is under way goes on after them, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.runtime.stale_models import MODELS, step_of
from tests.runtime.test_stale import SEARCH, slow

STAGES, MICROBATCHES = 2, 4


def stepped(model="perceptron"):
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    batches = [make(jax.random.key(100 + n), 4 * MICROBATCHES) for n in range(4)]
    return step_of(loss, tx), state, batches


def decorated(step, schedule, **options):
    options = {"schedule": schedule, "num_stages": STAGES, "num_microbatches": MICROBATCHES, **options}
    return autopar.parallelize(step, cluster=slow(), search=SEARCH, **options)


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module", params=["2bw", pytest.param("pipedream", marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """A schedule, a function, its step after four batches, a state in between, its folder and what all of them give."""
    with jax.enable_x64(True):
        fn, state, batches = stepped()
        step = decorated(fn, request.param)
        folder = str(tmp_path_factory.mktemp("states"))
        for n, batch in enumerate(batches):
            state, _ = step(state, batch)
            if n == 1:
                saved = state
                step.save(folder, state, wait=True)
        return request.param, fn, step, saved, folder, batches, step.drain(state)


def assert_goes_on(function, restored, trained):
    """A restored state is the saved one, and two more batches give what they gave."""
    _, _, _, saved, _, batches, want = trained
    assert type(restored) is type(saved)
    assert_same(restored, saved)
    for batch in batches[2:]:
        restored, _ = function(restored, batch)
    assert_same(function.drain(restored), want)


def test_a_state_that_is_restored_goes_on_as_if_it_had_not_been_saved(x64, trained):
    _, _, step, saved, folder, _, _ = trained
    assert_same(step.drain(step.restore(folder)), step.drain(saved))
    assert_goes_on(step, step.restore(folder), trained)
    assert_goes_on(step, jax.tree.map(np.asarray, step.restore(folder)), trained)


@pytest.mark.slow
def test_a_function_that_was_compiled_for_shapes_restores_a_state(x64, trained):
    schedule, fn, step, saved, folder, batches, _ = trained
    compiled = decorated(fn, schedule, plan=step.plans()[-1])
    compiled.compile(*shapes((saved.state, batches[0])))
    assert_goes_on(compiled, compiled.restore(folder), trained)


def test_a_new_function_restores_a_state(x64, trained):
    """Like a state, like shapes, and from arrays of numpy."""
    schedule, fn, step, saved, folder, _, _ = trained
    new = decorated(fn, schedule, plan=step.plans()[-1])
    assert_goes_on(new, new.restore(folder, like=saved), trained)
    assert_same(new.restore(folder, like=shapes(saved)), saved)
    assert_goes_on(new, jax.tree.map(np.asarray, saved), trained)


def test_a_state_that_was_drained_is_restored_as_the_plain_one(x64, trained, tmp_path):
    _, _, step, saved, _, _, _ = trained
    plain = step.drain(saved)
    step.save(str(tmp_path), plain, wait=True)
    assert_same(step.restore(str(tmp_path)), plain)
