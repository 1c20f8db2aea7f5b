"""Programs that fuzzing found to be wrong, made small by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.fuzz.check import assert_program, check
from tests.fuzz.support import argument, called, sgd, steps, total, user_mesh

PLANS = tuple((mesh, seed) for mesh in ((8,), (2, 4)) for seed in (1, 5, 12))


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["add", "set", "max"])
def test_a_write_at_one_position_of_a_split_dim(how):
    """XLA merges the slice that makes the piece with the read of a scatter of one index, and reads elsewhere."""

    def step(x, i, u):
        return getattr(x.at[i.sum() % 16], how)(jnp.sin(u))

    with jax.enable_x64(True):
        args = (argument("float", (16, 7), 1), argument("int", (16, 7), 215), argument("float", (), 3))
    assert_program(step, args, *PLANS)


@pytest.mark.slow
def test_a_write_at_the_first_position_under_a_gradient():
    """The same merge, for a position that is known: parts of the loss were wrong with these plans."""

    def step(x):
        def loss(x):
            y = jnp.tanh(x.at[..., 0].set(x[..., -1] * 2))
            return jnp.mean(jnp.sin(y)), y

        return jax.value_and_grad(loss, has_aux=True)(x)

    with jax.enable_x64(True):
        args = (argument("float", (8, 3, 16), 134),)
    assert_program(step, args, ((2, 4), 1), ((2, 4), 2))


@pytest.mark.slow
def test_half_precision_programs_compare():
    def step(x, w):
        return jax.value_and_grad(lambda v: jnp.mean(jnp.tanh(x @ v).astype(jnp.float32)))(w)

    args = (argument("float", (8, 16), 1, "bfloat16"), argument("float", (16, 8), 2, "bfloat16"))
    assert_program(step, args, *PLANS[:2], dtype="bfloat16")


@pytest.mark.slow
def test_a_sum_over_devices_of_a_complex_constant():
    """XLA's CPU compiler ends the process at an all-reduce or reduce-scatter of complex constants."""

    def step(p, x):
        return jnp.where(p.any(), x, 0.0)

    with jax.enable_x64(True):
        x = argument("float", (64, 8), 2)
        args = (argument("float", (8, 8), 1) > 0, x * (1 + 2j))
    assert_program(step, args, *PLANS)


@pytest.mark.parametrize("seed", [19, 20, 28])
def test_a_piece_of_a_slice_that_begins_too_late(seed):
    """XLA makes one slice of two, and forgets that the first start, 9 of at most 8, is clamped before."""

    def step(x, i):
        return jax.lax.dynamic_slice(x, (i.sum() % 17,), (8,))

    with jax.enable_x64(True):
        args = (argument("float", (16,), 13), argument("int", (4,), 63))
    assert_program(step, args, ((2, 4), seed))


@pytest.mark.slow
def test_a_piece_of_slices_that_begin_too_late():
    """The same, of a gather that picks one position, as slices under vmap are."""

    def step(x, i):
        return jax.vmap(lambda row: jax.lax.dynamic_slice(row, (i.sum() % 17,), (8,)))(x)

    with jax.enable_x64(True):
        args = (argument("float", (8, 16), 13), argument("int", (4,), 63))
    assert_program(step, args, *(((2, 4), seed) for seed in (13, 19, 20, 28)))


def test_an_all_to_all_after_another():
    """XLA forwards the pieces of the first to the second, in another layout than its other operands have."""

    def step(a, b, key):
        x = jnp.einsum("fcbe,abc->aef", b, a) * 0.354
        y = x @ jnp.swapaxes(x, -1, -2) * 0.447
        return y * jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (8, 2, 2)), x

    with jax.enable_x64(True):
        args = (argument("float", (8, 2, 4), 1), argument("float", (5, 4, 2, 2), 2), argument("key", (), 3))
    assert_program(step, args, ((2, 4), 28), ((2, 4), 87))


@pytest.mark.slow
def test_rows_beyond_a_dim_that_is_padded():
    """Indices that are promised to be in bounds and are not: XLA clamps the reads and drops the writes."""

    def step(params, moments, data):
        (a1,) = data
        (v3,) = params
        return v3[a1 % 8], v3.at[a1 % 8 - 2].get(mode="promise_in_bounds"), v3.at[a1 % 8].set(1.0, mode="drop")

    def written(x, i):
        return x.at[i % 8].set(2.0, mode="promise_in_bounds", unique_indices=False)

    with jax.enable_x64(True):
        params, index = (argument("float", (5, 8, 8, 1), 738),), argument("int", (4,), 788)
    assert_program(step, (params, (), (index,)), *(((8,), seed) for seed in (738, 739, 741, 744)))
    assert_program(written, (params[0], index), *(((8,), seed) for seed in (738, 739, 741, 744)))


@pytest.mark.slow
def test_a_window_in_a_loop_next_to_a_shard_map():
    """XLA divides what stands next to a `shard_map`, and gets the gradient of the window in the loop wrong."""

    def step(params):
        def loss(p):
            x, rows, carry = p
            split = jax.sharding.PartitionSpec("m")
            split_by_user = jax.shard_map(
                lambda part: jnp.tanh(part + jnp.sum(x)), mesh=user_mesh(2), in_specs=split, out_specs=split
            )(x)
            looped = jax.lax.fori_loop(0, 2, lambda _, v: jnp.tanh(v * 0.7 + jnp.mean(v @ x)), rows)

            def windows(c, row):
                top = jax.lax.reduce_window(row, -jnp.inf, jax.lax.max, (2,), (1,), "VALID")
                return jnp.tanh(c * 0.7 + top * 0.5), ()

            return total((split_by_user, jax.lax.scan(windows, carry, looped)[0]))

        return jax.value_and_grad(loss)(params)

    with jax.enable_x64(True):
        params = tuple(argument("float", s, k, "float32") for k, s in enumerate(((2, 8), (7, 2), (21, 1)), 546))
        outcome = check(step, (params,), [((8,), 1546), ((2, 4), None)], dtype="float32")
    assert outcome.kind in ("ok", "miscompiled"), outcome


@pytest.mark.slow
def test_a_sum_over_devices_is_added_after_a_factor_that_is_not_finite():
    """Of a write that is clipped jax's gradient divides by a count of 0: inf, and nan where a device's term is 0."""

    def step(x, i, u):
        return jax.grad(lambda u: jnp.sum(jnp.sin(x.at[i].max(u, mode="clip"))))(u)

    with jax.enable_x64(True):
        args = (argument("float", (8, 16), 1), jnp.asarray([9, 12, 3, 30]), argument("float", (4, 16), 2) + 1)
        outcomes = [check(step, args, [plan]) for plan in (((8,), None), ((8,), 1), ((8,), 6), ((2, 4), 6))]
        inside = check(step, (args[0], args[1] % 8, args[2]), [((8,), 6), ((2, 4), 6)])
    assert [o.kind for o in outcomes] == ["ok", "ok", "unstable", "unstable"], outcomes
    assert inside.kind == "ok", inside


def test_a_sum_of_parts_that_come_of_an_array_of_fewer_dims():
    def step(params, i, rows):
        def loss(p):
            a, b, c = p
            out = (
                b * 2 + a,
                jnp.take(a, i % 2, axis=0, mode="fill", fill_value=1),
                jax.nn.one_hot(rows % 3, 3).T @ a,
                jnp.max(jnp.take(a.at[rows.sum() % 2].set(0.7, mode="drop"), rows - 2, axis=0, mode="clip"), 0),
                jnp.any(steps(c) > 3),
            )
            return total(out), out

        return jax.value_and_grad(loss, has_aux=True)(params)

    with jax.enable_x64(True):
        params = argument("float", (2,), 54), argument("float", (), 55), argument("float", (8, 4, 8), 56)
        args = (params, argument("int", (), 104), argument("int", (2,), 105))
    assert_program(step, args, ((2, 4), 54))


def test_a_form_that_changes_nothing_padded_by_a_strategy():
    """A batch that only integers come of, and a pass that the user recomputes: no form changes this step."""

    def step(params, i):
        def loss(p):
            a, b = p
            normed = a * jax.lax.rsqrt(jnp.mean(a**2, -1, keepdims=True) + 0.1)
            return total(
                (jnp.swapaxes(normed, 0, 2), jnp.repeat(i, 3, axis=2), jnp.transpose(a, (1, 0, 2)) + b, normed)
            )

        return jax.value_and_grad(jax.checkpoint(loss))(params)

    with jax.enable_x64(True):
        params = argument("float", (5, 16, 4), 78), argument("float", (16, 5, 4), 79)
        args = (params, argument("int", (2, 16, 7), 128))
    assert_program(step, args, ((2, 4), 78))


def test_updates_join_a_loop_that_gives_out_what_it_takes():
    """The gradients are there before any operator of a trip has run: the update waited for one that makes them."""

    def step(params, key):
        def loss(p):
            rows = jax.lax.scan(lambda c, r: (c, called("io", r)), 0.0, p[0])[1]
            out = jax.random.permutation(key, 4).astype(jnp.int32), jnp.reshape(rows, (4, 2))
            return total(out), out

        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads), value, out

    with jax.enable_x64(True):
        args = ((argument("float", (8,), 16),), argument("key", (), 66))
    assert_program(step, args, ((2, 4), 16))
