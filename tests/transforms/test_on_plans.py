"""Transforms under `parallelize` on eight devices: what is sent, read from the plan and from the compiled program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.lower import hlo
from autopar.transforms import (
    Format,
    diloco,
    narrow_mean,
    narrow_parameters,
    one_bit_adam,
    per_replica_value_and_grad,
    powersgd,
)
from tests.end_to_end.clusters import SLOW

WIDTH = 64


def data(size=64):
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal((size, WIDTH)).astype(np.float32) for n in "xy"}


def loss(p, d):
    return jnp.mean((jnp.tanh(d["x"] @ p["a"]) - d["y"]) ** 2)


def first_state(tx):
    p = {"a": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8}
    return {"params": p, "opt": tx.init(p)}


def plain(tx):
    def step(state, d):
        value, grads = jax.value_and_grad(loss)(state["params"], d)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def with_replicas(tx, replicas=8, fun=loss):
    value_and_grad = per_replica_value_and_grad(fun, replicas)

    def step(state, d):
        values, grads = value_and_grad(state["params"], d)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, jnp.mean(values)

    return step


def compiled(fn, *args, **options):
    return autopar.parallelize(fn, cluster=SLOW, num_stages=1, num_microbatches=1, **options).compile(*args)


def collectives(program):
    """(dtype, kind, groups) of every collective of the compiled program."""
    return [(c.dtype, c.kind, c.groups) for c in hlo.collectives(program.as_text())]


def gathered_bytes(program):
    """Bytes of what each all-gather of the compiled program makes."""
    made = [re.search(r"= (\w)\w*?(\d+)\[([\d,]*)\]\S* all-gather\(", line) for line in program.as_text().splitlines()]
    return [int(m[2]) // 8 * int(np.prod([int(n) for n in m[3].split(",")])) for m in made if m]


def assert_same_values(program, fn, *args):
    got, wanted = program(*args), jax.jit(fn)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, wanted)


@pytest.mark.slow
def test_inner_steps_of_diloco_send_nothing():
    outer = diloco(plain(optax.adam(1e-3)), 8, 4)
    state = outer.init(first_state(optax.adam(1e-3)))
    program = compiled(outer.inner, state, data())
    assert collectives(program) == [] and program.plan.communication == ()
    split = {i.path: i.layout for i in program.plan.content.inputs}
    assert split["state.replicas['params']['a']"].startswith("[x")
    assert_same_values(program, outer.inner, state, data())


def test_inner_steps_of_islands_send_within_an_island():
    outer = diloco(plain(optax.sgd(0.1)), 2, 4)
    state = outer.init(first_state(optax.sgd(0.1)))
    program = compiled(outer.inner, state, data(512), mesh_shape=(2, 4))
    found = collectives(program)
    assert found
    for _, _, groups in found:
        for group in groups:
            assert len({device // 4 for device in group}) == 1, groups


def test_the_whole_step_of_diloco_runs_on_a_plan():
    outer = diloco(plain(optax.adam(1e-3)), 8, 2, format="int8")
    step = autopar.parallelize(outer, num_stages=1)
    ours = theirs = outer.init(first_state(optax.adam(1e-3)))
    for _ in range(3):
        ours, _ = step(ours, data())
        theirs, _ = jax.jit(outer)(theirs, data())
    np.testing.assert_allclose(
        outer.drain(ours)["params"]["a"], outer.drain(theirs)["params"]["a"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_powersgd_reduces_its_factors_alone():
    """Two matrices of two layers; of one alone the columns may be split, and then P alone is reduced."""

    def two_layers(p, d):
        return jnp.mean((jnp.tanh(d["x"] @ p["a"]) @ p["b"] - d["y"]) ** 2)

    tx = optax.chain(powersgd(2, 8), optax.sgd(0.1, momentum=0.9))
    state = {"params": {"a": first_state(tx)["params"]["a"], "b": jnp.eye(WIDTH)}}
    state["opt"] = tx.init(state["params"])
    step = with_replicas(tx, fun=two_layers)
    program = compiled(step, state, data(512), mesh_shape=(8,))
    numbers = sum(c.bytes * c.count for c in program.plan.communication if "gather" not in c.kind) / 4
    assert numbers == 2 * 2 * (WIDTH + WIDTH) + 1  # r (n + m) of each, and the loss
    assert_same_values(program, step, state, data(512))


def test_frozen_one_bit_adam_sends_bits():
    tx = one_bit_adam(1e-3, 8, 1, phase="frozen")
    program = compiled(with_replicas(tx), first_state(tx), data(512), mesh_shape=(8,))
    sent = {(c.kind, c.bytes) for c in program.plan.communication}
    size = WIDTH * WIDTH
    # Of eight replicas eight chunks of bits, with a scale each; the result of every server, with its scale.
    assert sent - {("all-reduce", 4), ("all-gather", 4)} == {
        ("all-to-all", 8 * size // 8), ("all-to-all", 64 * 4), ("all-gather", size // 8), ("all-gather", 8 * 4),
    }  # fmt: skip
    assert {"u8"} <= {dtype for dtype, _, _ in collectives(program)} <= {"u8", "f32"}


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("int4", 4)])
def test_narrow_means_send_codes(format, bits):
    tx = optax.chain(narrow_mean(format, 8), optax.sgd(0.1))
    program = compiled(with_replicas(tx), first_state(tx), data(512), mesh_shape=(8,))
    size, sent = WIDTH * WIDTH, [(c.kind, c.bytes) for c in program.plan.communication]
    assert ("all-to-all", 8 * size * bits // 8) in sent and ("all-gather", size * bits // 8) in sent
    # Scales: two blocks of 256 a chunk of 512.
    assert ("all-to-all", 64 * 2 * 4) in sent and ("all-gather", 8 * 2 * 4) in sent
    assert ("i8", "all-to-all") in {(d, k) for d, k, _ in collectives(program)}
    assert_same_values(program, with_replicas(tx), first_state(tx), data(512))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_narrow_parameters_are_gathered_as_codes(format):
    """Parameters split as in ZeRO-3, examples over the same devices."""
    step, state = narrow_parameters(plain(optax.sgd(0.1)), format), first_state(optax.sgd(0.1))
    split = {f"**['{name}']": (0,) for name in "axy"}
    wide = compiled(plain(optax.sgd(0.1)), state, data(512), mesh_shape=(8,), constraints=split)
    program = compiled(step, state, data(512), mesh_shape=(8,), constraints=split)
    gathered = [sum(c.bytes for c in p.plan.communication if c.kind == "all-gather") for p in (wide, program)]
    assert gathered[0] == 4 * WIDTH * WIDTH
    assert gathered[1] == gathered[0] * Format(format).bits(WIDTH) / 32
    assert sum(gathered_bytes(program)) == gathered[1] and max(gathered_bytes(wide)) == gathered[0]
    assert_same_values(program, step, state, data(512))


def test_rounding_at_random_takes_new_keys_every_step():
    tx = narrow_mean("int4", 2, seed=3)
    state, grads = tx.init(None), jax.random.normal(jax.random.key(0), (2, 64))
    first, state = tx.update(grads, state)
    second, state = tx.update(grads, state)
    assert int(state) == 2 and not np.array_equal(first, second)
