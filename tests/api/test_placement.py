"""`init`, `shard`, `compile`: where arrays lie, and what is said about the program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.api.placement import default_placement, prime_factors
from tests.api.steps import CLUSTER, Module, batch, params, sgd
from tests.end_to_end.clusters import toy
from tests.end_to_end.compare import assert_trees_same

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)
BIG = {"hidden": 256}


def step(state, data):
    p, loss = sgd(state["p"], data)
    m = jax.tree.map(lambda m, a, b: 0.9 * m + a - b, state["m"], p, state["p"])
    return {"p": p, "m": m}, loss


def create(key, scale=1.0):
    p = {"w": jax.random.normal(key, (256, 8)) * scale, "b": jnp.zeros(8)}
    return {"p": p, "m": jax.tree.map(jnp.zeros_like, p)}


@pytest.mark.slow
def test_init_before_a_plan_is_never_whole():
    state = parallelize(step).init(create, jax.random.key(0), scale=2.0)
    assert_trees_same(state, create(jax.random.key(0), 2.0))
    for leaf in jax.tree.leaves(state):
        assert [s.data.size for s in leaf.addressable_shards] == [leaf.size // 8] * 8


@pytest.mark.slow
def test_init_after_a_plan_lies_as_planned():
    f = parallelize(step, memory_limit=70_000)
    args = create(jax.random.key(0)), batch(32, **BIG)
    f.plan(*args)
    state = f.init(create, jax.random.key(0))
    wanted = f.compile(*args).input_shardings[0][0]
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_trees_same(f(state, args[1]), step(*args))


def test_init_with_numbers_that_must_be_known_and_other_leaves():
    def make(n, activation):
        return Module(jnp.ones((n, 8)), activation, "layer", 1.0)

    m = parallelize(step).init(make, 16, jnp.tanh)
    assert m.activation is jnp.tanh and m.name == "layer" and m.scale == 1.0
    assert m.w.addressable_shards[0].data.size == 16


@pytest.mark.parametrize(
    ("shape", "parts"), [((8, 3), 8), ((4, 3), 4), ((2, 6), 4), ((2, 2, 2), 8), ((3, 5), 1), ((), 1), ((0, 8), 8)]
)
def test_default_placement_splits_as_far_as_dims_allow(shape, parts):
    (sharding,) = default_placement([jax.ShapeDtypeStruct(shape, jnp.float32)], jax.devices())
    x = jax.device_put(jnp.ones(shape), sharding)
    assert x.addressable_shards[0].data.size == x.size // parts
    assert prime_factors(12) == [2, 2, 3]


def test_shard_places_as_planned():
    f = parallelize(sgd)
    p, data = f.shard(params(**BIG), batch(32, **BIG))
    wanted = f.compile(params(**BIG), batch(32, **BIG)).input_shardings[0]
    for leaf, sharding in zip(jax.tree.leaves((p, data)), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_trees_same((p, data), (params(**BIG), jax.tree.map(jnp.asarray, batch(32, **BIG))))
    assert parallelize(jnp.sum).shard(np.ones(8)).shape == (8,)


def test_arrays_that_lie_elsewhere_are_moved():
    mesh = jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    f, data = parallelize(sgd), batch(32, **BIG)
    want = sgd(params(**BIG), data)
    for spec in (PartitionSpec(), PartitionSpec("other")):
        p = jax.device_put(params(**BIG), NamedSharding(mesh, spec))
        assert_trees_same(f(p, data), want)
    assert_trees_same(f(jax.device_put(params(**BIG), jax.devices()[5]), data), want)
    assert_trees_same(f(params(**BIG), data), want)


def test_shardings_of_plan_and_program_agree():
    f = autopar.parallelize(sgd, cluster=toy(bandwidth=1e11), mesh_shape=(2, 4))
    args = params(**BIG), batch(32, **BIG)
    plan, compiled = f.plan(*args), f.compile(*args)
    specs, shardings = plan.input_shardings, compiled.input_shardings[0]
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)) == jax.tree.structure(args)
    of_plan = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert of_plan == [s.spec for s in jax.tree.leaves(shardings)]
    assert any(tuple(s) for s in of_plan)
    assert compiled.plan == plan
    assert "HloModule" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    loaded = autopar.Plan.from_json(plan.to_json())
    assert loaded.input_shardings["p['w']"] == specs[0]["w"]


def test_a_batch_that_lies_elsewhere_is_moved_once(monkeypatch):
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    state, data = step.shard(params(), batch())[0], jax.tree.map(jnp.asarray, batch())
    want = sgd(params(), batch())
    step(state, data)
    moved, real = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **k: (moved.append(np.shape(x)), real(x, *a, **k))[1])
    for _ in range(3):
        assert_trees_same(step(state, data), want)
    assert moved == [], "it was moved by the first call"
    other = {**data, "x": data["x"] + 1}
    assert_trees_same(step(state, other), sgd(params(), {**batch(), "x": batch()["x"] + 1}))
    assert moved == [other["x"].shape]
    local = step.compile(state, data).local
    count = len(local.moved)
    del other
    assert len(local.moved) == count - 1, "what nobody can give again is let go"
