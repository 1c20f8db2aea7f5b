"""Mutable references that a step makes are values that its loops carry; references as arguments are written back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import AutoparError, MicrobatchError, TraceError
from autopar.lower.microbatch import microbatched
from tests.microbatch.running import numbers, run, traced

SIZE = 8


def arguments():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((SIZE, SIZE))), jnp.asarray(rng.standard_normal((SIZE, SIZE)))


def trained(forward):
    """A step with a gradient of ``forward(w, x)``."""

    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
        return w - 0.1 * grads, loss

    return step


def written(ref, value):
    ref[...] = value


def chunks(w, x):
    """Gradients of chunks added up in a reference."""
    total = jax.new_ref(jnp.zeros_like(w))

    def one(c, rows):
        total[...] += jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(w)
        return c, None

    lax.scan(one, 0, x.reshape(4, -1, SIZE))
    return w - 0.1 * jax.freeze(total) / 4


def repeated(w, x):
    grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    total = jax.new_ref(jnp.zeros_like(w))
    lax.scan(lambda c, t: (written(total, total[...] + grads * t), (c, None))[1], 0, jnp.arange(3.0))
    return w - 0.1 * total[...]


def indexed(w, x):
    ref = jax.new_ref(w)
    ref[1:3] += 1.0
    ref[0, 5] = 3.0
    old = jax.ref.swap(ref, ..., ref[...] * 2)
    jax.ref.addupdate(ref, 0, jnp.ones(SIZE))
    return old, ref[2], ref[...] @ x.T


def in_while(w, x):
    ref = jax.new_ref(jnp.zeros(()))
    count, value = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (written(ref, ref[...] + c[1].sum()), (c[0] + 1, c[1] * 2))[1], (0, x)
    )
    return count, value @ w, ref[...]


def in_branches(w, x):
    ref = jax.new_ref(w)
    lax.cond(x.sum() > 0, lambda: written(ref, ref[...] * 2), lambda: written(ref, ref[...] + 1))
    return x @ jax.freeze(ref)


def in_nested_jits(w, x):
    ref = jax.new_ref(w)
    times = jax.jit(lambda r, t: written(r, r[...] * t))
    plus = jax.jit(lambda t: written(ref, ref[...] + t))
    times(ref, 2.0)
    plus(3.0)
    return x @ ref[...]


def _in_remat(w, x):
    @jax.checkpoint
    def inner(w):
        ref = jax.new_ref(w)
        ref[...] = jnp.sin(ref[...]) @ w
        return ref[...]

    return jnp.tanh(x @ inner(w))


@jax.custom_vjp
def _ruled(v):
    ref = jax.new_ref(v)
    ref[...] = jnp.sin(ref[...])
    return ref[...]


_ruled.defvjp(lambda v: (_ruled(v), v), lambda v, g: (jnp.cos(v) * g,))


@jax.custom_jvp
def _tangent(v):
    ref = jax.new_ref(v)
    ref[...] = jnp.sin(ref[...])
    return ref[...]


_tangent.defjvp(lambda p, t: (_tangent(*p), jnp.cos(p[0]) * t[0]))


def _differentiated(w, x):
    ref = jax.new_ref(jnp.zeros_like(w))
    lax.scan(lambda c, t: (written(ref, ref[...] + jnp.sin(w) * t), (c, None))[1], 0, jnp.arange(3.0))
    return x @ ref[...]


def recorded(w, x):
    """What a loop writes down, and a count."""
    kept, count = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros((), jnp.int32))

    def body(c, i):
        c = jnp.tanh(c @ w)
        kept[i] = c.sum()
        count[...] += 1
        return c, None

    return lax.scan(body, x, jnp.arange(4))[0], jax.freeze(kept), count[...]


def batched(w, x):
    def one(row):
        ref = jax.new_ref(row)
        ref[0] = 5.0
        return ref[...]

    return jax.vmap(one)(x) @ w


def in_shard_map(w, x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("m",))

    def body(v):
        ref = jax.new_ref(v)
        ref[...] = ref[...] * 2
        return ref[...]

    return jax.shard_map(body, mesh=mesh, in_specs=P("m"), out_specs=P("m"), check_vma=False)(x) @ w


STEPS = {
    f.__name__: f
    for f in (chunks, repeated, indexed, in_while, in_branches, in_nested_jits, recorded, batched, in_shard_map)
} | {
    "remat": trained(_in_remat),
    "custom vjp": trained(lambda w, x: x @ _ruled(w)),
    "differentiated": trained(_differentiated),
    "only read": lambda w, x: x @ jax.new_ref(w)[...],
    "never read": lambda w, x: (jax.new_ref(w), x @ w)[1],
    "tangent alone": lambda w, x: jax.jvp(_tangent, (w,), (x,))[1],
    "empty": lambda w, x: (jax.new_ref(jnp.zeros((0, 3)))[...] + 1, x @ w),
}


@pytest.mark.parametrize("name", STEPS)
def test_at_once_and_in_microbatches(x64, name):
    fn, args = STEPS[name], arguments()
    wanted = [numbers(v) for v in jax.tree.leaves(jax.jit(fn)(*args))]
    found, leaves = traced(fn, args)
    assert all(op.primitive not in ("get", "swap", "addupdate", "new_ref", "freeze") for op in found.graph.operators)
    programs = [found]
    try:
        programs.append(microbatched(found, 2))
    except MicrobatchError:  # a typed refusal, which other steps of this form get too
        assert name not in ("chunks", "repeated", "remat", "custom vjp", "differentiated")
    for program in programs:
        for got, want in zip(map(numbers, run(program, leaves)), wanted, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_arguments_are_written_back(x64):
    def step(state, x):
        state["w"][...] -= 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"][...])
        state["n"][...] += 1
        return state["w"][...].sum()

    w, x = arguments()
    ours, plain = ({"w": jax.new_ref(w), "n": jax.new_ref(jnp.int32(0))} for _ in range(2))
    parallel = autopar.parallelize(step, num_microbatches=2)
    roles = {i.path: i.role for i in parallel.plan(ours, x).content.inputs}
    assert roles["state['w'].value"] == "parameter" and roles["x"] == "batch"
    for _ in range(2):
        np.testing.assert_allclose(parallel(ours, x), jax.jit(step)(plain, x), rtol=1e-12)
        np.testing.assert_allclose(ours["w"][...], plain["w"][...], rtol=1e-12)
    assert int(ours["n"][...]) == 2 and ours["w"].sharding == plain["w"].sharding


CLOSED_OVER = {
    "read": lambda r, x: x * r[...],
    "written": lambda r, x: (written(r, x[0]), x)[1],
    "for": lambda r, x: lax.fori_loop(0, 3, lambda i, c: c + r[...], x),
    "scan": lambda r, x: lax.scan(lambda c, v: (written(r, r[...] + v), (c, v))[1], 0, x),
    "while": lambda r, x: lax.while_loop(lambda c: c.sum() < 9, lambda c: (written(r, c[0]), c + 1)[1], x),
    "branch": lambda r, x: lax.cond(x.sum() > 0, lambda x: (written(r, x[0]), x)[1], lambda x: x, x),
    "jit": lambda r, x: jax.jit(lambda v: (written(r, v[0]), v)[1])(x) * r[...],
    "gradient": lambda r, x: jax.grad(lambda v: (written(r, lax.stop_gradient(v[0])), v.sum())[1])(x),
    "remat": lambda r, x: jax.grad(lambda v: jax.checkpoint(lambda v: jnp.sin(v * r[...]))(v).sum())(x),
    "vmap": lambda r, x: jax.vmap(lambda v: v * r[...])(x),
}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_a_reference_of_outside_is_an_error_with_the_line(name):
    """Wherever it is closed over; jit takes each of them."""
    outside, x = jax.new_ref(jnp.ones(SIZE)), jnp.ones((SIZE, SIZE))
    jax.jit(lambda x: CLOSED_OVER[name](outside, x))(x)
    before = np.asarray(outside[...])
    with pytest.raises(TraceError, match=r"closes over a mutable reference[\s\S]*test_refs.py") as caught:
        autopar.parallelize(lambda x: CLOSED_OVER[name](outside, x), num_microbatches=2)(x)
    assert caught.value.remedy == "pass the reference as an argument"
    np.testing.assert_array_equal(outside[...], before)


def test_what_is_not_followed_is_an_error():
    x = jnp.ones((SIZE, SIZE))
    with pytest.raises(TraceError, match=r"custom_jvp_call[\s\S]*test_refs.py"):
        autopar.parallelize(lambda x: _tangent(x) + 1)(x)
    with pytest.raises(TraceError, match="returns a mutable reference"):
        autopar.parallelize(jax.new_ref)(x)
    with pytest.raises(AutoparError, match="without a flush"):
        autopar.parallelize(lambda r, x: r[...] @ x, schedule="2bw", num_stages=2)(jax.new_ref(x), x)
