"""Prints and callbacks run once, as on one device; those that need an order are refused."""

from __future__ import annotations

import functools
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.lower.callbacks import Calls
from autopar.search import Manual
from tests.api.steps import CLUSTER
from tests.versions import KNOWN_JAX

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)
X = jnp.arange(16.0).reshape(8, 2)


def test_a_print_comes_once(capfd):
    def step(x):
        jax.debug.print("sum {}", x.sum())
        return x * 2

    f = parallelize(step)
    for _ in range(2):
        f(X).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 120.0\nsum 120.0\n"


def test_callbacks_run_once():
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(("debug", float(v))), x.mean())
        y = io_callback(lambda v: seen.append(("io", v.shape)) or v.sum(), jax.ShapeDtypeStruct((), jnp.float32), x)
        flag = io_callback(lambda v: np.bool_(True), jax.ShapeDtypeStruct((), jnp.bool_), x)
        z = jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        io_callback(lambda v: seen.append(("none", float(v))), None, x.max())
        return y, z.sum(0), flag

    y, z, flag = parallelize(step)(X)
    jax.effects_barrier()
    assert float(y) == 120 and list(z) == [112, 128] and bool(flag)
    assert sorted(seen) == [("debug", 7.5), ("io", (8, 2)), ("none", 15.0)]


def test_callbacks_in_a_loop_and_a_gradient():
    seen = []

    def loss(w, x):
        def body(c, row):
            jax.debug.callback(lambda v: seen.append(float(v)), row.sum())
            return c + row.sum() * w, None

        return jax.lax.scan(body, 0.0, x)[0]

    value, grad = parallelize(jax.value_and_grad(loss))(2.0, X)
    jax.effects_barrier()
    assert float(value) == 240 and float(grad) == 120
    assert sorted(seen) == sorted(float(r.sum()) for r in X)


@pytest.mark.parametrize("options", [{"search": Manual(dp=8)}, {"num_stages": 1, "remat": "full"}])
def test_callbacks_of_microbatches_run_once_with_whole_values(options):
    """Of values of examples, weights, metrics, gradients and new weights; in branches and loops of nothing else."""
    seen = []

    def note(name, *values):
        seen.append((name, *(np.asarray(v).round(3).tolist() for v in values)))
        return np.float32(len(name))

    def show(name, *values):
        jax.debug.callback(functools.partial(note, name), *values)

    def step(ws, x):
        show("batch", x)

        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
                show("examples and weights", y, w)
                total = jax.lax.stop_gradient(y.sum())
                answer = io_callback(functools.partial(note, "called"), jax.ShapeDtypeStruct((), jnp.float32), total)
                show("answer", answer)
                jax.lax.cond(total < 1e6, lambda t: show("branch", t), lambda t: None, total)
                jax.lax.scan(lambda c, r: (c, show("row", r)), 0, y)
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        new = [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]
        show("after", value, *grads, *new)
        return new, value

    def calls(step):
        seen.clear()
        results = step([jnp.eye(2), jnp.eye(2) / 2], X / 16)
        jax.effects_barrier()
        return sorted(seen), results

    (want, of_jit), (got, found) = calls(jax.jit(step)), calls(parallelize(step, num_microbatches=2, **options))
    assert got == want and len(want) == 1 + 2 * (4 + len(X)) + 1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, of_jit)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_callback_of_weights_is_called_again_where_microbatches_are_recomputed(in_loop):
    @jax.custom_jvp
    def doubled(y):
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0]))

    def layer(y, w):
        return jnp.tanh(y @ w) + doubled(w.sum()), None

    def step(ws, x):
        def loss(ws):
            y = jax.lax.scan(layer, x, ws)[0] if in_loop else layer(layer(x, ws[0])[0], ws[1])[0]
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return ws - 0.1 * grads, value

    args = jnp.stack([jnp.eye(2), jnp.eye(2) / 2]), X / 16
    f = parallelize(step, num_stages=1, num_microbatches=2, remat="full")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), f(*args), step(*args))


@pytest.mark.parametrize("kind", ["print", "io"])
def test_ordered_effects_are_refused_with_their_line(kind):
    def step(x):
        if kind == "print":
            jax.debug.print("{}", x.sum(), ordered=True)
        else:
            io_callback(lambda v: None, None, x.sum(), ordered=True)
        return x

    with pytest.raises(autopar.TraceError, match=r"at: test_effects.py:\d+.*step\)") as caught:
        parallelize(step)(X)
    assert "ordered" in str(caught.value)


@pytest.mark.parametrize(
    ("in_loop", "kind", "microbatches"),
    [(False, "debug", 1), (True, "debug", 1), (False, "debug", 2), (False, "io", 1), (False, "io", 2)],
)
def test_stages_say_which_prints_they_leave_out(in_loop, kind, microbatches):
    """Stages run what outputs need. Where the number of stages is free there is one, which prints."""
    seen = []

    def see(v):
        seen.append(float(v))
        return v

    def layer(x, w):
        y = jnp.tanh(x @ w)
        mean = jax.lax.stop_gradient(y.mean())
        if kind == "debug":
            jax.debug.callback(see, mean)
        else:
            io_callback(see, jax.ShapeDtypeStruct((), jnp.float32), mean)
        return y, None

    def loss(ws, x):
        if in_loop:
            x, _ = jax.lax.scan(layer, x, ws)
        else:
            for w in ws:
                x, _ = layer(x, w)
        return (x**2).mean()

    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return ws - 0.1 * gradients, value

    ws, x = jnp.stack([jnp.eye(8) / 2] * 4), jnp.ones((8, 8))
    two = parallelize(step, num_stages=2, num_microbatches=microbatches)
    (note,) = [n for n in two.plan(ws, x).content.notes if "num_stages=1 runs" in n]
    assert "test_effects.py" in note
    for got, wanted in zip(two(ws, x), step(ws, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    jax.effects_barrier()
    seen.clear()
    free = parallelize(step)
    assert free.plan(ws, x).num_stages == 1 and not any(
        "num_stages=1 runs" in n for n in free.plan(ws, x).content.notes
    )
    free(ws, x)
    jax.effects_barrier()
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
def test_an_exception_of_a_callback_is_raised_after_the_step(kind):
    """Other devices would wait for the one that called, until XLA ends the process."""
    calls = []

    def fails(x):
        calls.append(0)
        if len(calls) == 1:
            raise ValueError("mine")
        return np.eye(8, dtype=np.float32)

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if kind == "debug":
            jax.debug.callback(fails, x)
            return x @ x
        y = jax.pure_callback(fails, shape, x) if kind == "pure" else io_callback(fails, shape, x)
        return y @ x

    f, x = parallelize(step, search=Manual(dp=8)), jnp.eye(8)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError[\s\S]*mine") as raised:
        f(x)
    assert isinstance(raised.value.__cause__, ValueError)
    np.testing.assert_array_equal(f(x), x)


@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
def test_arguments_of_a_callback_are_there_when_it_begins(kind):
    """With as many devices as cores nothing would copy them: all devices wait for the one that called."""
    there = []

    def reads(v):
        there.append(isinstance(v, jax.Array) and v.is_ready() and float(np.asarray(v).sum()))
        return np.asarray(v) + 1

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if kind == "debug":
            jax.debug.callback(reads, x)
            return x + 1
        return jax.pure_callback(reads, shape, x) if kind == "pure" else io_callback(reads, shape, x)

    f, x = parallelize(step, search=Manual(dp=8)), jnp.ones((512, 256))
    for n in range(3):
        np.testing.assert_array_equal(f(x + n), x + n + 1)
    jax.effects_barrier()
    assert there == [(1 + n) * x.size for n in range(3)]


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint2, jnp.bfloat16, jnp.float8_e4m3fn, jnp.bool_, jnp.complex64])
def test_arguments_of_every_dtype_are_there_when_a_callback_begins(dtype):
    there = []

    def reads(v):
        there.append((v.is_ready(), v.dtype, np.asarray(v).astype(np.complex64).sum()))
        return v

    def step(x):
        return jax.pure_callback(reads, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    f, x = parallelize(step, search=Manual(dp=8)), jnp.ones((512, 256), dtype)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(f(x)), np.asarray(x))
    assert there == [(True, np.dtype(dtype), x.size)] * 3


@pytest.mark.parametrize("kind", ["pure", "debug"])
def test_other_devices_wait_for_a_callback_outside_of_collectives(monkeypatch, kind):
    """XLA ends the process where a collective takes longer than 40 seconds."""
    wait, waiting, seven = Calls.wait, [], threading.Event()

    def noted(calls, device, callbacks):
        waiting.append(device)
        if len(waiting) == 7:
            seven.set()
        wait(calls, device, callbacks)

    monkeypatch.setattr(Calls, "wait", noted)
    met = []

    def slow(v):
        met.append(seven.wait(20))
        return np.asarray(v)

    def step(x):
        if kind == "debug":
            jax.debug.callback(slow, x)
            return x + x.sum()
        return jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + x.sum()

    f = parallelize(step, search=Manual(dp=8))
    np.testing.assert_array_equal(f(X), X + 120)
    jax.effects_barrier()
    assert met == [True] and sorted(waiting) == list(range(1, 8))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_devices_of_a_stage_wait_for_its_callbacks(monkeypatch, schedule):
    wait, waiting = Calls.wait, []

    def noted(calls, device, callbacks):
        waiting.append(device)
        wait(calls, device, callbacks)

    monkeypatch.setattr(Calls, "wait", noted)

    def layer(x, w):
        @jax.custom_jvp
        def scaled(y):
            return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

        scaled.defjvp(lambda p, t: (scaled(*p), 2 * t[0]))
        return jnp.tanh(x @ w) + scaled(w.sum())

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = layer(y, w)
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    ws, x = [jnp.eye(8) / 2] * 4, jnp.ones((8, 8))
    f = parallelize(step, num_stages=2, num_microbatches=2, schedule=schedule)
    value = f(ws, x)[1]
    if schedule == "1f1b":
        np.testing.assert_allclose(value, step(ws, x)[1], rtol=1e-6)
    jax.effects_barrier()
    assert set(waiting) == {1, 2, 3}


def unaligned(shape):
    """Ones that jax does not take over as they lie: a thread of its CPU client copies them."""
    size = 4 * int(np.prod(shape))
    memory = np.empty(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    ones = memory[start : start + size].view(np.float32).reshape(shape)
    ones[...] = 1
    return ones


def tripled_slowly(v):
    time.sleep(1.5)
    return np.asarray(v) * 3


#: What a callback does that never ends where the devices of its step hold all threads of jax's CPU client.
STUCK = {
    "copies": lambda v: np.asarray(jnp.asarray(unaligned(v.shape))),
    "computes": lambda v: np.asarray(jax.jit(lambda a, b: a * 3 * b)(v, unaligned(v.shape))),
}


@pytest.mark.skipif(len(jax.devices()) < (os.cpu_count() or 1), reason="the client has more threads than devices")
@pytest.mark.parametrize("kind", STUCK)
def test_a_callback_that_waits_for_threads_of_its_own_step_is_an_error(monkeypatch, kind):
    monkeypatch.setenv("AUTOPAR_WAIT_S", "0.5")
    callbacks = [STUCK[kind], tripled_slowly]

    def step(x):
        return jax.pure_callback(lambda v: callbacks.pop(0)(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x) + x.sum()

    f, x = parallelize(step, search=Manual(dp=8)), jnp.ones((512, 256))
    if not KNOWN_JAX:  # newer ones make such arrays on threads that no step holds
        np.testing.assert_array_equal(f(x), {"copies": 1, "computes": 3}[kind] + x.size)
        return
    with pytest.raises(autopar.ClusterError, match=r"waited for 0.5 s for a thread[\s\S]*at: test_effects.py:\d+ \("):
        f(x)
    # One that takes as long, and uses no processor, is waited for.
    np.testing.assert_array_equal(f(x), 3 + x.size)


def test_bits_of_results_are_kept():
    zeros = np.array([-0.0, 0.0, np.nan, -np.inf], np.float32)
    f = parallelize(
        lambda x: x.sum() * 0 + 1 / jax.pure_callback(lambda v: zeros, jax.ShapeDtypeStruct((4,), x.dtype), x),
        search=Manual(dp=8),
    )
    np.testing.assert_array_equal(f(X), [-np.inf, np.inf, np.nan, -0.0])


def test_an_exception_of_a_callback_in_a_stage_is_raised_after_the_step():
    calls = []

    def tanh(v):
        calls.append(v.shape)
        if len(calls) == 2:
            raise ValueError("mine")
        return np.tanh(v)

    def layer(x, w):
        return jax.pure_callback(tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ w)

    def step(ws, x):
        for w in ws:
            x = layer(x, w)
        return x

    ws, x = [jnp.eye(8) / 2] * 4, jnp.ones((8, 8))
    f = parallelize(step, num_stages=2, num_microbatches=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="mine") as raised:
        f(ws, x)
    assert isinstance(raised.value.__cause__, ValueError) and len(calls) == 4
    np.testing.assert_allclose(f(ws, x), step(ws, x), rtol=1e-6)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "ampnet"])
def test_an_exception_of_a_callback_without_a_flush_is_raised_after_the_call(schedule):
    """The state of the call that failed is still there."""
    fails = [False]

    @jax.custom_jvp
    def doubled(y):
        def call(v):
            if fails[0]:
                threading.Event().wait(0.3)  # what no result depends on is not over when the results are there
                raise ValueError("mine")
            return np.asarray(v) * 2

        return jax.pure_callback(call, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0]))

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w) + doubled(w.sum())
            return (y**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    ws, x = [jnp.eye(8) / 2] * 4, jnp.ones((8, 8))
    f = parallelize(step, num_stages=2, num_microbatches=2, schedule=schedule)
    state, value = f(ws, x)
    again = f(state, x)[1]
    fails[0] = True
    for given in (ws, state):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError[\s\S]*mine") as raised:
            f(given, x)
        assert isinstance(raised.value.__cause__, ValueError)
    fails[0] = False
    if schedule == "ampnet":  # its order is made while it runs
        assert np.isfinite(f(ws, x)[1])
    else:
        assert float(f(ws, x)[1]) == float(value) and float(f(state, x)[1]) == float(again)


def test_the_end_of_a_step_with_callbacks_is_not_polled(monkeypatch):
    def slow(v):
        threading.Event().wait(0.2)
        return np.asarray(v)

    f = parallelize(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x), search=Manual(dp=8))
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail(f"slept {s} s"))
    np.testing.assert_array_equal(f(X), X)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (np.ones(3, np.float32), r"output shape for return value #0: Expected: \(8, 2\), Actual: \(3,\)"),
        (np.ones((8, 2), np.int32), "output dtype for return value #0: Expected: float32, Actual: int32"),
        ((np.ones((8, 2), np.float32),) * 2, "Mismatched number of outputs"),
    ],
)
def test_results_that_a_callback_did_not_announce_are_what_jit_says(returned, text):
    def step(x):
        return jax.pure_callback(lambda v: returned, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        parallelize(step, search=Manual(dp=8))(X).block_until_ready()


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2, jnp.int4])
def test_small_integers_of_a_callback(dtype):
    x = jnp.ones((2, 3, 4), dtype)
    ones = np.ones(x.shape, dtype)
    f = parallelize(lambda x: jax.pure_callback(lambda _: ones, jax.ShapeDtypeStruct(x.shape, dtype), x))
    np.testing.assert_array_equal(np.asarray(f(x).astype(jnp.int32)), 1)


def test_debug_nans_raise_what_jit_raises():
    f = parallelize(lambda x: jnp.log(x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        f(-jnp.ones(8))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        f(jnp.zeros(8))


def test_a_callback_has_the_width_of_the_call_that_it_is_traced_in():
    with jax.enable_x64(True):
        f = parallelize(lambda x: jax.pure_callback(lambda v: v + 0.5, jax.ShapeDtypeStruct(x.shape, x.dtype), x) / 3)
        np.testing.assert_array_equal(f(np.ones((8, 2))), np.full((8, 2), 0.5))


@pytest.mark.parametrize("kind", ["pure", "debug"])
def test_a_step_with_callbacks_returns_keys(kind):
    """Results of jax's extended dtypes are waited for as others are."""

    def step(x, key):
        if kind == "debug":
            jax.debug.callback(lambda v: None, x.sum())
        else:
            x = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x, jax.random.split(key)

    keys = parallelize(step, search=Manual(dp=8))(X, jax.random.key(3))[1]
    assert (keys == jax.random.split(jax.random.key(3))).all()


def test_a_key_is_printed_by_one_of_several_devices(capfd):
    def step(x, key):
        jax.debug.print("{}", key)
        return x + x.sum()

    f = parallelize(step, search=Manual(dp=8))
    np.testing.assert_array_equal(f(X, jax.random.key(0)), X + 120)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("0 0") == 1
