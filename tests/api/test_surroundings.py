"""What is around a call: a mesh of the user's, `jax.disable_jit`; and arguments that jax's compiled objects refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar import TraceError
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same

AXES = pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])


def mesh_of(axes):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)


@AXES
def test_under_a_mesh_of_the_users(axes):
    want = sgd(params(), batch())
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    with jax.set_mesh(mesh_of(axes)):
        p, _ = step(params(), batch())
        for _ in range(2):  # planned, again from the last signature, and with what a step returned
            got = step(params(), batch())
            assert_trees_same(got, want)
        assert_trees_same(step(p, batch()), sgd(want[0], batch()))
        assert set(got[1].sharding.mesh.axis_names) == {"data", "model"}
        assert float(got[1] + 1) == pytest.approx(float(want[1]) + 1)  # a result works with the user's own code
    assert_trees_same(step(params(), batch()), want)


@AXES
def test_planned_and_placed_under_a_mesh_of_the_users(axes):
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    with jax.set_mesh(mesh_of(axes)):
        assert step.plan(params(), batch()).step_time > 0
        placed, _ = step.shard(params(), batch())
        assert_trees_same(placed, params())
        assert_trees_same(step.compile(params(), batch())(params(), batch()), sgd(params(), batch()))
        assert_trees_same(step.init(params), params())


@AXES
def test_arguments_on_a_mesh_of_the_users(axes):
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec("data")))
        got = autopar.parallelize(lambda w, x: jnp.sum(jnp.tanh(x @ w)), cluster=CLUSTER)(jnp.ones((8, 8)), x)
    assert float(got) == pytest.approx(float(np.tanh(8.0) * 128), rel=1e-5)


def test_a_pipeline_under_a_mesh_of_the_users():
    step = autopar.parallelize(sgd, cluster=CLUSTER, num_stages=2, num_microbatches=2)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        got = step(params(), batch())
    assert_trees_same(got, sgd(params(), batch()))


def test_without_jit_the_plain_function_runs():
    seen = []

    def step(x):
        seen.append(type(x))
        return x + 1 if float(x.sum()) > 0 else x

    decorated = autopar.parallelize(step, cluster=CLUSTER)
    with jax.disable_jit():
        assert decorated(jnp.ones(3))[0] == 2
    assert len(seen) == 1 and not issubclass(seen[0], jax.core.Tracer)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 2}])
def test_arguments_smaller_than_a_byte(dtype, options):
    def step(state, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ (w * state["q"].astype(x.dtype))) ** 2))(state["w"])
        return {"q": state["q"], "w": state["w"] - 0.1 * g}, loss

    state = {"q": jnp.arange(64).reshape(8, 8).astype(dtype) % 7, "w": jnp.linspace(0, 1, 64).reshape(8, 8)}
    x = jnp.linspace(-1, 1, 128).reshape(16, 8)
    decorated = autopar.parallelize(step, cluster=CLUSTER, **options)
    got, want = decorated(state, x), step(state, x)
    assert got[0]["q"].dtype == dtype
    for a, b in zip(
        jax.tree.leaves((got, decorated(*got[:1], x))), jax.tree.leaves((want, step(want[0], x))), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-4, atol=1e-5)


def test_a_trace_is_tried_again_only_where_jax_wants_a_value():
    calls = []

    def step(x, n):
        calls.append(n)
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        autopar.parallelize(step, cluster=CLUSTER)(jnp.ones(8), 2)
    assert len(calls) == 1


def test_a_number_whose_value_is_wanted_is_a_value_of_the_program():
    step = autopar.parallelize(lambda x, n: x[:n] * 2 if n > 2 else x, cluster=CLUSTER)
    assert step(jnp.ones(8), 4).shape == (4,)
    with pytest.raises(TraceError, match="cannot be traced"):
        autopar.parallelize(lambda x, n: x if x.sum() > 0 else x + n, cluster=CLUSTER)(jnp.ones(8), 4)
