"""What is around a call: a mesh of the user's, `jax.disable_jit`; and arguments that jax's compiled objects refuse."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar import TraceError
from autopar.api.user_mesh import on_mesh
from autopar.ir import Layout
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same

AXES = pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])


def mesh_of(axes):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)


@pytest.mark.parametrize(
    "spec", [(), ("data",), (None, None, "model"), ("model", None, "data"), (None, ("data", "model"))]
)
def test_a_sharding_is_said_in_the_axes_of_another_mesh_over_the_same_devices(spec):
    named = NamedSharding(mesh_of(AxisType.Auto), PartitionSpec(*spec))
    other = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    again = on_mesh(named, 3, other)
    assert again.mesh == other and again.is_equivalent_to(named, 3)


@pytest.mark.few(1)
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


def typed(shape, *spec):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh_of(AxisType.Explicit), PartitionSpec(*spec)))


def dims_split(plan, path):
    (record,) = [r for r in plan.content.inputs if r.path == path]
    sizes = plan.stages[record.stage].mesh_shape
    return [int(np.prod([sizes[a] for a in axes])) for axes in Layout.parse(record.layout).dims]


def told(plan):
    return [n for n in plan.notes if "by its type" in n]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"num_microbatches": 2, "num_stages": 2}])
@pytest.mark.parametrize("around", [True, False])
def test_what_types_say_of_arguments_is_kept(around, options):
    data = {"x": typed((16, 16), "data"), "y": typed((16, 8), "data")}
    p = {"w": typed((16, 8), None, "model"), "b": typed((8,))}
    step = autopar.parallelize(sgd, cluster=CLUSTER, **options)
    with jax.set_mesh(mesh_of(AxisType.Explicit)) if around else nullcontext():
        plan = step.plan(p, data)
        assert_trees_same(step(p, data), sgd(jax.tree.map(np.asarray, p), jax.tree.map(np.asarray, data)))
    assert [dims_split(plan, f"data['{n}']") for n in "xy"] == [[4, 1], [4, 1]]
    assert dims_split(plan, "p['w']") == [1, 2]
    assert [n.endswith("kept") and "not kept" not in n for n in told(plan)] == [True] * 3


@pytest.mark.slow
def test_what_types_say_and_no_mesh_keeps_is_told():
    step = autopar.parallelize(sgd, cluster=CLUSTER, mesh_shape=(8,))
    plan = step.plan(params(), {"x": typed((16, 16), "data"), "y": typed((16, 8))})
    (note,) = told(plan)
    assert "data['x']" in note
    assert "P('data',)" in note
    assert "not kept" in note


def test_constraints_by_path_come_before_types():
    step = autopar.parallelize(sgd, cluster=CLUSTER, constraints={"data/x": ()})
    plan = step.plan(params(), {"x": typed((16, 16), "data"), "y": typed((16, 8), "data")})
    assert dims_split(plan, "data['x']") == [1, 1]
    assert dims_split(plan, "data['y']") == [4, 1]
    assert len(told(plan)) == 1


def test_types_of_shapes_are_kept():
    x = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=typed((16, 16), "data").sharding)
    plan = autopar.parallelize(sgd, cluster=CLUSTER).plan(params(), {"x": x, "y": np.ones((16, 8), np.float32)})
    assert dims_split(plan, "data['x']") == [4, 1]


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


@pytest.mark.few(2)
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


def test_a_number_of_a_model_that_has_no_gradient_is_a_value_of_the_program():
    """As the first value of a window of equinox's pools, where all arrays of a module are differentiated."""

    def step(model, x):
        arrays = {k: v for k, v in model.items() if isinstance(v, jax.Array)}

        def loss(arrays):
            m = {**model, **arrays}
            return jax.lax.reduce_window(x * m["w"], m["least"], jax.lax.max, (2, 1), (2, 1), "VALID").sum()

        value, grads = jax.value_and_grad(loss)(arrays)
        return {**model, **{k: v - 0.1 * grads[k] for k, v in arrays.items()}}, value

    model, x = {"w": jnp.arange(4.0), "least": -float("inf")}, jnp.arange(32.0).reshape(8, 4)
    got, want = autopar.parallelize(step, cluster=CLUSTER)(model, x), step(model, x)
    assert got[0]["least"] == want[0]["least"]
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1])


def test_a_number_whose_value_is_wanted_is_a_value_of_the_program():
    step = autopar.parallelize(lambda x, n: x[:n] * 2 if n > 2 else x, cluster=CLUSTER)
    assert step(jnp.ones(8), 4).shape == (4,)
    with pytest.raises(TraceError, match="cannot be traced"):
        autopar.parallelize(lambda x, n: x if x.sum() > 0 else x + n, cluster=CLUSTER)(jnp.ones(8), 4)


def _adds_to(step):
    def outer(x):
        total = jax.new_ref(jnp.zeros(3))
        doubled = step(total, x)
        return jax.freeze(total), doubled

    return outer


def test_references_of_an_outer_trace_are_arguments():
    def step(total, x):
        total[...] += x.sum()
        return x * 2

    outer, want = _adds_to(autopar.parallelize(step, cluster=CLUSTER)), _adds_to(jax.jit(step))
    x = jnp.arange(8.0)
    assert_trees_same(jax.jit(outer)(x), want(x))
    assert_trees_same(jax.grad(lambda x: outer(x)[0].sum())(x), jax.grad(lambda x: want(x)[0].sum())(x))
    assert_trees_same(jax.vmap(outer)(jnp.ones((2, 8))), jax.vmap(want)(jnp.ones((2, 8))))
