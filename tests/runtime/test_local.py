"""Placing of arguments: nothing moves that lies right, and a repeated call is recognised without hashing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from tests.end_to_end.clusters import toy


def step(state, x):
    return [s + x.sum() for s in state], x.mean()


@pytest.fixture
def compiled():
    f = autopar.parallelize(step, cluster=toy())
    return f.compile([jnp.ones((8, 8))] * 3, np.ones((8, 4), np.float32))


def leaves(x=None):
    return [*(jnp.full((8, 8), float(i)) for i in range(3)), np.ones((8, 4), np.float32) if x is None else x]


def test_what_lies_right_is_not_moved(compiled):
    local = compiled.local
    placed = local.place_all(leaves())
    assert [p.sharding for p in placed] == list(local.program.input_shardings[:4])
    assert all(a is b for a, b in zip(local.place_all(placed), placed, strict=True))
    assert all(a is b for a, b in zip(local.match(placed), placed, strict=True))


def test_equal_shardings_under_other_names_are_not_moved(compiled):
    mesh = jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec()))
    wanted = compiled.local.program.input_shardings[0]
    placed = compiled.local.place_all([whole, *leaves()[1:]])[0]
    assert (placed is whole) == wanted.is_equivalent_to(whole.sharding, 2)
    assert placed.sharding.is_equivalent_to(wanted, 2)


@pytest.mark.parametrize(
    "x", [np.ones((8, 5), np.float32), np.ones((8, 4), np.int32), jnp.ones((8, 4), jnp.bfloat16), 3.0, "text"], ids=str
)
def test_other_types_do_not_match(compiled, x):
    assert compiled.local.match(leaves(x)) is None


def test_results_come_back_as_arguments_without_moving(compiled):
    local = compiled.local
    placed = local.place_all(leaves())
    for _ in range(3):
        results = local.run(placed, placed)
        placed = local.match([*results[:3], placed[3]])
        assert all(a is b for a, b in zip(placed, results[:3], strict=False))
    np.testing.assert_allclose(placed[2], 2.0 + 3 * 32)


def test_numpy_is_read_at_the_call(compiled):
    x = np.ones((8, 4), np.float32)
    first = compiled.run(leaves(x))
    jax.block_until_ready(first)
    x[:] = 2.0
    second = compiled.run(leaves(x))
    assert float(first[1]) == 1.0 and float(second[1]) == 2.0


def test_closed_over_arrays_are_placed_once():
    table = jnp.arange(64.0).reshape(8, 8)
    f = autopar.parallelize(lambda x: x @ table, cluster=toy())
    compiled = f.compile(jnp.ones((8, 8)))
    (constant,) = compiled.local.constants
    assert constant.sharding.is_equivalent_to(compiled.local.program.input_shardings[1], 2)
    np.testing.assert_allclose(f(jnp.ones((8, 8))), jnp.ones((8, 8)) @ table)


def rows(state, x):
    return [(s + x.mean()).astype(s.dtype) for s in state], x @ state[0][:4]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_moving_an_array_of_one_device_compiles_nothing(donated, caplog):
    """jax compiles a program for each shape that it slices, and one for each copy: seconds of a first call."""
    state = [jnp.arange(8.0 * n).reshape(8, n) for n in (3, 5, 7, 9)] + [jnp.ones((8, 2), jnp.bfloat16)]
    kept = [np.asarray(s) for s in state]
    split = PartitionSpec("x")
    f = autopar.parallelize(
        rows, cluster=toy(), donate_argnums=donated, constraints={"state/**": split}, mesh_axes={"x": 8}
    )
    local = f.compile(state, np.ones((8, 4), np.float32)).local
    assert all(not s.is_fully_replicated for s in local.program.input_shardings[:5])
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        placed = local.place_all([*state, np.ones((8, 4), np.float32)])
    assert [r.message for r in caplog.records if "ompil" in r.message] == []
    assert [p.sharding for p in placed] == list(local.program.input_shardings[:6])
    assert all((np.asarray(p) == k).all() and p.dtype == k.dtype for p, k in zip(placed, kept, strict=False))
    local.run(placed, [*state, placed[5]])
    assert all(s.is_deleted() == bool(donated) for s in state)
    if not donated:
        assert all((np.asarray(s) == k).all() for s, k in zip(state, kept, strict=True))


def test_an_array_that_was_moved_can_be_donated_elsewhere(compiled):
    """Neither a view of it is kept, nor is its buffer read later."""
    x = jnp.full((8, 8), 2.0)
    placed = compiled.local.place_all([x, *leaves()[1:]])[0]
    at = x.unsafe_buffer_pointer()
    y = jax.jit(lambda a: a + 1, donate_argnums=0)(x)
    assert y.unsafe_buffer_pointer() == at and x.is_deleted()
    assert (np.asarray(placed) == 2).all()
