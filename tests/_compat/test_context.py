"""Every setting in jax's trace context makes another program; programs are made under the settings of their call."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._compat.context import context_names, context_text, context_texts, entered, trace_context
from autopar.frontend.signature import SignatureOptions, flatten_call
from autopar.search.cache import key_of
from tests.api.steps import CLUSTER, batch, params, sgd

config = pytest.importorskip("jax._src.config")  # the states are jax's own: there is no public list of them
STATES = sorted(n for n in context_names() if n in config.config_states)


@contextmanager
def holding(name, value):
    """Sets a state for this thread without asking whether jax can work under the value."""
    state = config.config_states[name]
    before = state.swap_local(value)
    try:
        yield
    finally:
        state.set_local(before)


def other_value(name):
    """A value of the kind of the present one that is not the present one."""
    value = config.config_states[name].value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if name == "jax_default_device":
        return jax.devices()[1]
    if type(value).__module__ != "builtins":
        return next(v for v in type(value) if v is not value)
    return "another"


def test_there_are_states():
    assert {"jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_rank_promotion"} <= set(STATES)
    assert len(context_names()) == len(trace_context())


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_part_of_the_signature_and_of_the_key_on_disk(name):
    def signature():
        return flatten_call(lambda x: x, (np.ones(4, np.float32),), {}, SignatureOptions())[0]

    plain, plain_text = signature(), context_text(trace_context())
    with holding(name, other_value(name)):
        assert signature() != plain
        assert context_text(trace_context()) != plain_text
        changed = trace_context()
    assert signature() == plain
    with entered(changed):
        assert trace_context() == changed
    assert trace_context() == plain.context


def test_user_contexts_make_another_program():
    around, seen = jax.make_user_context(1), []
    step = autopar.parallelize(lambda x: seen.append(around.value) or x * around.value, cluster=CLUSTER)
    assert step(jnp.ones(8)).sum() == 8
    with around(3):
        assert step(jnp.ones(8)).sum() == 24
    assert step(jnp.ones(8)).sum() == 8
    assert seen == [1, 3]


def test_a_setting_without_a_text_keeps_no_plan():
    assert context_text(trace_context()) is not None
    with jax.make_user_context()(object()):
        assert None in context_texts(trace_context()).values()
        assert context_text(trace_context()) is None


def test_plans_on_disk_are_of_one_setting():
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    pure = step._plain
    signature, _ = pure.resolve((params(), batch()), {})
    problem = pure.problem(pure.traced(signature), None)
    key = key_of(problem, "planner", "here")
    assert problem.settings and key is not None
    with jax.default_matmul_precision("highest"):
        other, _ = pure.resolve((params(), batch()), {})
    assert key_of(replace(problem, settings=pure.problem(pure.traced(other), None).settings), "planner", "here") != key
    assert key_of(replace(problem, settings=None), "planner", "here") is None


CASES = {
    "seed offset": (lambda s: jax.random.uniform(jax.random.key(s), (8,)), (3,), ("jax_random_seed_offset", 5)),
    "partitionable": (
        lambda k: jax.random.normal(jax.random.wrap_key_data(k), (8,)),
        (np.array([0, 3], np.uint32),),
        ("jax_threefry_partitionable", False),
    ),
    "wide": (lambda x: x + jnp.arange(4).sum() / 3, (np.ones(4),), ("jax_enable_x64", True)),
    "strict": (
        lambda x, y: x + y,
        (np.ones(4, np.float32), np.arange(4, dtype=np.int32)),
        ("jax_numpy_dtype_promotion", "strict"),
    ),
    "ranks": (lambda x: x + x[0], (np.ones((4, 4), np.float32),), ("jax_numpy_rank_promotion", "raise")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"cluster": CLUSTER}])
def test_a_later_call_under_another_setting_is_as_with_jit(case, options):
    fn, args, (name, value) = CASES[case]

    def outcomes(made):
        found = []
        for context in (None, (name, value), None):
            try:
                with config.config_states[context[0]](context[1]) if context else jax.default_device(None):
                    result = np.asarray(made(*args))
                found.append((result.dtype.name, result.tolist()))
            except Exception as error:
                found.append(type(error).__name__)
        return found

    assert outcomes(autopar.parallelize(fn, **options)) == outcomes(jax.jit(fn))


def test_precision_of_a_later_call_is_in_its_program():
    step = autopar.parallelize(lambda x: x @ x, cluster=CLUSTER)
    x = np.ones((8, 8), np.float32)
    assert "HIGHEST" not in step.lower(x).as_text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in step.lower(x).as_text()
    assert "HIGHEST" not in step.lower(x).as_text()


def test_a_program_is_made_under_the_settings_of_its_call():
    def draw(k):
        return jax.random.normal(jax.random.wrap_key_data(k), (8,))

    key = np.array([0, 3], np.uint32)
    step = autopar.parallelize(draw, cluster=CLUSTER)
    with jax.threefry_partitionable(False):
        want = jax.jit(draw)(key)
        lowered = step.lower(key)
    compiled = lowered.compile()
    np.testing.assert_array_equal(compiled(key), want)
    assert not np.array_equal(step(key), want)


def test_compiled_objects_ask_for_no_setting():
    x = np.ones((8, 8), np.float32)
    compiled = autopar.parallelize(lambda x, n: x @ x * n, cluster=CLUSTER).compile(x, 2.0)
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        assert compiled(x, np.float32(3.0)).sum() == 8 * 8 * 8 * 3


def test_settings_are_those_of_a_thread():
    step = autopar.parallelize(lambda s: jax.random.uniform(jax.random.key(s), (8,)), cluster=CLUSTER)
    here, there = np.asarray(step(3)), []

    def other():
        with config.config_states["jax_random_seed_offset"](5):
            there.append(np.asarray(step(3)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not np.array_equal(here, there[0])
    np.testing.assert_array_equal(step(3), here)
