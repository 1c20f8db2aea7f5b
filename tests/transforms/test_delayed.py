"""Delayed gradients against the replay of their version map, the stability limit, and another implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.transforms import DelayedState, Extrapolated, dc_asgd, delayed, pipemare_rate, staleness_aware_rate
from tests.api.steps import batch, loss_fn, params
from tests.transforms.oracles import converges, delay_harness, replay, stability_limit, version_2bw

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))


def first_state(dtype=jnp.float64):
    p = jax.tree.map(lambda x: x.astype(dtype), params())
    return {"params": p, "opt": TX.init(p), "count": jnp.zeros((), jnp.int32)}


def update(state, grads):
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "count": state["count"] + 1}


def plain(state, data):
    def loss(p):
        return loss_fn(jax.tree.map(jnp.tanh, p), data["x"], data["y"])

    value, grads = jax.value_and_grad(loss)(state["params"])
    metrics = {"loss": value, "weights": sum(jnp.sum(w * w) for w in jax.tree.leaves(state["params"]))}
    return update(state, grads), metrics


def gradients(p, data):
    return jax.grad(lambda q: loss_fn(jax.tree.map(jnp.tanh, q), data["x"], data["y"]))(p)


def apart(state, data):
    return gradients(state["params"], data), {}


def wide(seed, size=16):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), batch(size, seed=seed))


def run(step, state, batches):
    states = []
    for data in batches:
        state, _ = step(state, data)
        states.append(state)
    return states


def assert_close(a, b, tolerance=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.few(2)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("form", ["plain", "jitted", "apart"])
def test_equals_the_replay_of_its_version_map(x64, delay, form):
    step = {
        "plain": lambda: delayed(plain, delay=delay),
        "jitted": lambda: delayed(jax.jit(plain), delay=delay),
        "apart": lambda: delayed(apart, update, delay=delay),
    }[form]()
    batches = [wide(s) for s in range(6)]
    ours = run(jax.jit(step), step.init(first_state()), batches)
    theirs = replay(
        gradients, update, first_state(), [[b] for b in batches], lambda k: max(k - 1 - delay, 0), lambda s: s["params"]
    )
    assert_close([step.drain(s) for s in ours], theirs)
    assert not np.allclose(theirs[2]["params"]["w"], theirs[0]["params"]["w"])


@pytest.mark.slow
def test_one_step_of_delay_is_2bw_with_microbatches(x64):
    """The mean over the microbatches of a batch, each read at 2BW's version."""
    parts = [[wide(10 * s + i, 4) for i in range(4)] for s in range(5)]
    whole = [jax.tree.map(lambda *x: jnp.concatenate(x), *p) for p in parts]
    step = delayed(plain)
    ours = run(jax.jit(step), step.init(first_state()), whole)
    theirs = replay(gradients, update, first_state(), parts, lambda k: version_2bw(k, 4), lambda s: s["params"])
    assert_close([s.state for s in ours], theirs)


def test_no_delay_is_the_plain_step_to_the_bit():
    step = delayed(plain, delay=0)
    ours, theirs = step.init(first_state(jnp.float32)), first_state(jnp.float32)
    assert ours.versions == ()
    for s in range(3):
        ours, told = jax.jit(step)(ours, batch(seed=s))
        theirs, wanted = jax.jit(plain)(theirs, batch(seed=s))
        assert_equal((ours.state, told), (theirs, wanted))


@pytest.mark.slow
def test_metrics_of_the_loss_are_of_the_old_parameters_and_others_of_the_newest():
    step = delayed(plain)
    old, now = first_state(jnp.float32), first_state(jnp.float32)
    now["params"] = jax.tree.map(lambda x: x + 1, now["params"])
    _, told = step(DelayedState(now, (tuple(jax.tree.leaves(old["params"])),)), batch())
    assert told["loss"] == plain(old, batch())[1]["loss"]
    assert told["weights"] == plain(now, batch())[1]["weights"]


@pytest.mark.parametrize("delay", range(8))
def test_largest_stable_rate_on_a_quadratic(x64, delay):
    for factor, expected in ((0.98, True), (1.02, False)):
        rate = factor * stability_limit(delay)

        def sgd(w, rate=rate):
            return w - rate * jax.grad(lambda v: 0.5 * v * v)(w)

        step = delayed(sgd, delay=delay, params="")
        assert converges(step, step.init(jnp.float64(1.0)), 4000, lambda s: s.state) is expected, (delay, factor)
    assert stability_limit(1) == pytest.approx(stability_limit(0) / 2)  # 2BW: half of SGD


def _largest_rate(delay: int, horizon: float) -> float:
    """From the roots of ``z^(d+2) - z^(d+1) + a ((1+h) z - h)``, by bisection."""
    low, high = 0.0, 2.0
    for _ in range(60):
        rate = (low + high) / 2
        coefficients = np.zeros(delay + 3)
        coefficients[:2] = 1, -1
        coefficients[-2] += rate * (1 + horizon)
        coefficients[-1] -= rate * horizon
        low, high = (rate, high) if max(abs(np.roots(coefficients))) < 1 else (low, rate)
    return low


@pytest.mark.parametrize(("horizon", "better"), [(0.5, True), (3.0, False)])
def test_extrapolation_moves_the_largest_stable_rate_as_its_roots_say(x64, horizon, better):
    limit = _largest_rate(3, horizon)
    assert (limit > stability_limit(3)) is better
    for factor in (0.98, 1.02):

        def sgd(w, rate=factor * limit):
            return w - rate * jax.grad(lambda v: 0.5 * v * v)(w)

        step = delayed(sgd, delay=3, params="", prediction=Extrapolated(horizon))
        assert converges(step, step.init(jnp.float64(1.0)), 4000, lambda s: s.state) is (factor < 1)


@pytest.mark.parametrize("delay", [1, 2])
def test_another_implementation_delays_the_gradient_as_well(x64, delay):
    """A queue of gradients applies g(W(t-d)) at step t too, but evaluates it d batches earlier."""
    fixed = wide(0)
    tx = delay_harness(optax.sgd(0.01), delay)
    p = jax.tree.map(lambda x: x.astype(jnp.float64), params())
    state, queued = tx.init(p), [p]
    for _ in range(8):
        updates, state = tx.update(gradients(queued[-1], fixed), state, queued[-1])
        queued.append(optax.apply_updates(queued[-1], updates))

    def sgd(w, data):
        return jax.tree.map(
            lambda a, g: a - 0.01 * g,
            w,
            jax.grad(lambda q: loss_fn(jax.tree.map(jnp.tanh, q), data["x"], data["y"]))(w),
        )

    step = delayed(sgd, delay=delay, params="")
    ours = step.init(p)
    # The queue's first updates are zeros: it is behind by the delay, and ours repeats the first gradient meanwhile.
    for t in range(delay):
        assert_close(queued[t + 1], p)
    ours = DelayedState(p, tuple(tuple(jax.tree.leaves(p)) for _ in range(delay)))
    mine = []
    for _ in range(6):
        ours = jax.jit(step)(ours, fixed)
        mine.append(ours.state)
    assert_close(mine, queued[delay + 1 : delay + 7])


def test_drained_state_goes_on_as_the_plain_step():
    step = delayed(plain)
    state = run(jax.jit(step), step.init(first_state(jnp.float32)), [batch(seed=s) for s in range(3)])[-1]
    again = step.init(step.drain(state))
    assert_equal(again.state, state.state)
    assert_equal(again.versions[0], tuple(jax.tree.leaves(state.state["params"])))


@pytest.mark.slow
def test_statistics_are_of_the_newest_state():
    """State that the forward pass reads and that is no parameter has one version."""

    def step(state, x):
        def loss(w):
            return jnp.mean((w * x - state["mean"]) ** 2), jnp.mean(x) + state["mean"]

        (value, mean), g = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": state["params"] - 0.1 * g, "mean": mean}, value

    later = delayed(step)
    state = later.init({"params": jnp.float32(1.0), "mean": jnp.float32(0.0)})
    for count in range(1, 4):
        state, _ = later(state, jnp.ones(4))
        assert state.state["mean"] == count


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [1, 2])
def test_runs_on_a_plan(delay):
    step = delayed(plain, delay=delay)
    parallel = autopar.parallelize(step, num_stages=1)
    ours, theirs = step.init(first_state(jnp.float32)), step.init(first_state(jnp.float32))
    for s in range(3):
        ours, told = parallel(ours, batch(seed=s))
        theirs, wanted = jax.jit(step)(theirs, batch(seed=s))
    assert_close((ours, told), (theirs, wanted), 1e-5)


def test_dc_asgd_is_its_formula_and_nothing_at_no_age(x64):
    g, now, read = jnp.float64(3.0), jnp.float64(2.0), jnp.float64(1.5)
    assert dc_asgd(0.1)(g, now, read) == 3.0 + 0.1 * 9.0 * 0.5
    assert dc_asgd(0.1)(g, now, now) == g
    batches = [wide(s) for s in range(4)]
    for delay, same in ((0, True), (2, False)):
        corrected = delayed(apart, update, delay=delay, correction=dc_asgd(1.0))
        bare = delayed(apart, update, delay=delay)
        a = run(corrected, corrected.init(first_state()), batches)[-1].state["params"]["w"]
        b = run(bare, bare.init(first_state()), batches)[-1].state["params"]["w"]
        assert bool(jnp.all(a == b)) is same


@pytest.mark.slow
def test_prediction_is_nothing_at_no_delay():
    step = delayed(plain, delay=0, prediction=Extrapolated(1.0))
    state = step.init(first_state(jnp.float32))
    assert state.versions == ()
    assert_equal(step(state, batch())[0].state, plain(state.state, batch())[0])


def test_rates_for_old_gradients():
    rate = pipemare_rate(0.1, delay=4, warmup_steps=10)
    assert float(rate(0)) == pytest.approx(0.025)
    assert float(rate(5)) == pytest.approx(0.05)
    assert float(rate(100)) == pytest.approx(0.1)
    assert float(pipemare_rate(0.1, 0, 10)(0)) == pytest.approx(0.1)
    assert float(staleness_aware_rate(0.1, 0)) == float(staleness_aware_rate(0.1, 1)) == pytest.approx(0.1)
    assert float(staleness_aware_rate(0.1, 4)) == pytest.approx(0.025)


def test_what_cannot_be_delayed_is_refused():
    with pytest.raises(AutoparError, match="no leaves under 'params'"):
        delayed(plain).init({"model": 1.0})
    with pytest.raises(AutoparError, match="delay=-1"):
        delayed(plain, delay=-1)
    with pytest.raises(AutoparError, match="correction"):
        delayed(plain, correction=dc_asgd())
    by_hand = delayed(lambda w, x: w - 0.1 * x, params="")
    with pytest.raises(TraceError, match="differentiates nothing"):
        by_hand(by_hand.init(jnp.float32(1.0)), jnp.float32(1.0))

    def two_updates(w, x):
        once = w - 0.1 * jax.grad(lambda v: v * v * x)(w)
        return once - 0.1 * jax.grad(lambda v: v**3)(once)

    twice = delayed(two_updates, params="")
    with pytest.raises(TraceError, match="update that another gradient makes"):
        twice(twice.init(jnp.float32(1.0)), jnp.float32(1.0))

    def inside_a_loop(w, x):
        def body(_, v):
            return v - 0.1 * jax.grad(lambda u: u * u * x)(v)

        return jax.lax.fori_loop(0, 2, body, w)

    looped = delayed(inside_a_loop, params="")
    with pytest.raises(TraceError, match="inside a loop"):
        looped(looped.init(jnp.float32(1.0)), jnp.float32(1.0))

    def returns_no_state(w, x):
        return {"gradient": jax.grad(lambda v: v * v * x)(w) * 2}

    strange = delayed(returns_no_state, params="")
    with pytest.raises(AutoparError, match="neither a state"):
        strange(strange.init(jnp.float32(1.0)), jnp.float32(1.0))
