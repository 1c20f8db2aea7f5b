"""Calling conventions: whatever `jax.jit` takes and more works decorated, with the same values."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER, Module, Strict, batch, loss_fn, params, sgd
from tests.end_to_end.compare import assert_same, assert_trees_same

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)
same = functools.partial(assert_same, cluster=CLUSTER)


# -- arguments -------------------------------------------------------------------------------------


def test_pytrees_in_and_out():
    state = {"p": params(), "extra": [(), None, (jnp.ones(3), {"deep": jnp.arange(4)})]}

    def step(state, data):
        p, loss = sgd(state["p"], data)
        return {**state, "p": p}, {"loss": loss, "nested": [state["extra"][2][0] * 2, None]}

    same(step, (state, batch()), steps=2)


@pytest.mark.slow
def test_keyword_arguments():
    def step(p, *, data, rate):
        return sgd(p, data, rate)

    f = parallelize(step)
    got = f(params(), data=batch(), rate=jnp.float32(0.2))
    assert_trees_same(got, sgd(params(), batch(), 0.2))
    assert set(f.plan(params(), data=batch(), rate=jnp.float32(0.2)).input_stages) == {
        "p['b']", "p['w']", "data['x']", "data['y']", "rate",
    }  # fmt: skip


def test_an_argument_by_position_or_by_keyword():
    f = parallelize(sgd)
    want = sgd(params(), batch())
    assert_trees_same(f(params(), batch()), want)
    assert_trees_same(f(params(), data=batch()), want)
    assert_trees_same(f(data=batch(), p=params()), want)


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "mode"}, {"static_argnums": (-2,)}])
@pytest.mark.parametrize("by_name", [False, True])
def test_static_in_the_middle(options, by_name):
    def step(p, mode, data):
        assert isinstance(mode, str)
        p, loss = sgd(p, data)
        return (p, loss * 2) if mode == "double" else (p, loss)

    f = parallelize(step, **options)
    for mode in ("double", "single"):
        got = f(params(), mode=mode, data=batch()) if by_name else f(params(), mode, batch())
        assert_trees_same(got, step(params(), mode, batch()))


def test_static_keyword_only():
    def step(p, data, *, power):
        return jnp.sum(p["w"] ** power) + sum(range(power)), sgd(p, data)

    f = parallelize(step, static_argnames=("power",))
    for power in (2, 3):
        assert_trees_same(f(params(), batch(), power=power), step(params(), batch(), power=power))


def test_static_values_of_different_types_are_different_programs():
    f = parallelize(lambda x, flag: x + (1 if flag is True else 2), static_argnums=1)
    assert f(jnp.zeros(8), True)[0] == 1
    assert f(jnp.zeros(8), 1)[0] == 2


@pytest.mark.slow
def test_several_batches_batch_first_and_no_batch():
    def several(x, y, p):
        return jax.grad(loss_fn)(p, x, y), {"n": x.shape[0]}

    data = batch()
    same(several, (data["x"], data["y"], params()))
    closed = jax.tree.map(jnp.asarray, data)
    same(lambda p: sgd(p, closed), (params(),))
    same(lambda p: sgd(p, {"x": jnp.ones((8, 16)), "y": jnp.zeros((8, 8))}), (params(),))
    same(lambda: jnp.arange(8.0) * 2, ())


def test_batch_on_dim_1_and_its_size_as_a_number():
    def step(p, x):
        return jnp.sum(jnp.tanh(x.T @ p["w"])) / x.shape[1]

    f = same(jax.value_and_grad(step), (params(), jnp.ones((16, 8))))
    assert f.plan(params(), jnp.ones((16, 8))).content.inputs[2].role == "batch"


@pytest.mark.slow
def test_a_last_batch_of_another_size():
    f, p, q = parallelize(sgd), params(), params()
    for size in (16, 16, 13, 1, 16):
        p, loss = f(p, batch(size))
        q, want = sgd(q, batch(size))
        assert_trees_same((p, loss), (q, want))
    assert len(f._plain.compiled) == 3


def test_scalars_and_zero_sizes():
    def step(scale, empty, x):
        return x * scale, jnp.concatenate([empty, x]), empty.sum(), empty

    same(step, (jnp.float32(2), jnp.zeros((0, 4)), jnp.ones((8, 4))))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "complex64", "float16", "bfloat16"])
def test_dtypes(dtype):
    x = jnp.arange(64).reshape(8, 8).astype(dtype)

    def step(x):
        y = x if x.dtype == jnp.bool_ else x + x
        return y, y.T, jnp.where(y, 1, 0).sum(0), x

    same(step, (x,))


def test_python_numbers():
    def step(x, i, f, b):
        assert not isinstance(i, int)
        return x * i, jnp.where(b, x, -x) * f, i, f, b

    x = jnp.ones(8, jnp.bfloat16)
    got = parallelize(step)(x, 3, 0.5, True)
    assert_trees_same(got[:2], (x * 3, x * 0.5))
    assert got[2:] == (3, 0.5, True) and all(isinstance(v, jax.Array) for v in got[2:])


def test_python_numbers_that_must_be_known():
    def step(x, repeat, shape, flag):
        for _ in range(repeat):
            x = x * 2
        return (x if flag else -x) + jnp.ones(shape["n"])

    f = parallelize(step)
    for repeat, flag in ((2, True), (3, False), (2, True)):
        got = f(jnp.ones(8), repeat, {"n": 8}, flag)
        assert_trees_same(got, step(jnp.ones(8), repeat, {"n": 8}, flag))
    assert len(f._plain.compiled) == 2


def test_a_number_in_a_module_becomes_an_array_of_the_same_program():
    def step(m, x):
        return Module(m.w - 0.1, m.activation, m.name, m.scale), jnp.sum(m(x))

    m = Module(jnp.ones((4, 8)), jnp.tanh, "layer", 3)
    f = parallelize(step)
    for _ in range(3):
        m, _ = f(m, jnp.ones((8, 4)))
    assert m.scale == 3 and isinstance(m.scale, jax.Array) and m.scale.weak_type
    assert m.activation is jnp.tanh and m.name == "layer" and m.nothing is None
    assert len(f._plain.compiled) == 1


def test_leaves_that_are_no_arrays_tell_programs_apart():
    f = parallelize(lambda m, x: m(x))
    for fn in (jnp.tanh, jnp.sin, jnp.tanh):
        m = Module(jnp.ones((4, 8)), fn, "layer", 2.0)
        assert_trees_same(f(m, jnp.ones((8, 4))), m(jnp.ones((8, 4))))
    assert len(f._plain.compiled) == 2


def test_results_that_are_no_arrays():
    def step(x):
        return {"x": x, "name": "done", "fn": jnp.tanh, "none": None, "numpy": np.ones(3, np.float32)}

    got = parallelize(step)(jnp.ones(8))
    assert got["name"] == "done" and got["fn"] is jnp.tanh and got["none"] is None
    assert_trees_same((got["x"], got["numpy"]), (jnp.ones(8), jnp.ones(3)))


def test_containers_that_refuse_other_leaves():
    def step(s, x):
        return Strict(s.array + x.sum(0)), x

    f = same(step, (Strict(jnp.ones(8)), jnp.ones((4, 8))), steps=2)
    assert f.plan(Strict(jnp.ones(8)), jnp.ones((4, 8))).input_shardings
    assert f.compile(Strict(jnp.ones(8)), jnp.ones((4, 8))).input_shardings


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_keys(make):
    def step(key, x):
        key, sub = jax.random.split(key)
        return key, x + jax.random.normal(sub, x.shape), jax.random.split(sub, 8)

    same(step, (make(3), jnp.ones((16, 8))))


def test_a_step_that_changes_its_argument_while_traced():
    def step(state, data):
        state["p"], loss = sgd(state.pop("p"), data)
        state["losses"].append(loss)
        return state

    state = {"p": params(), "losses": [jnp.zeros(())]}
    got = parallelize(step)(state, batch())
    assert set(state) == {"p", "losses"} and len(state["losses"]) == 1
    assert_trees_same(got, step({"p": params(), "losses": [jnp.zeros(())]}, batch()))


# -- functions -------------------------------------------------------------------------------------


def test_a_step_that_is_jitted_already():
    same(jax.jit(sgd), (params(), batch()), steps=2)
    jitted = jax.jit(lambda n, x: x * n + sum(range(n)), static_argnums=0)
    got = parallelize(jitted)(4, jnp.ones(8))
    assert_trees_same(got, jnp.ones(8) * 4 + 6)


def test_methods():
    class Trainer:
        def __init__(self, rate):
            self.rate = rate

        @functools.partial(autopar.parallelize, cluster=CLUSTER)
        def step(self, p, data):
            return sgd(p, data, self.rate)

        def plain(self, p, data):
            return sgd(p, data, self.rate)

    for rate in (0.1, 0.5):
        trainer = Trainer(rate)
        want = sgd(params(), batch(), rate)
        assert_trees_same(trainer.step(params(), batch()), want)
        assert_trees_same(parallelize(trainer.plain)(params(), batch()), want)
        assert trainer.step.plan(params(), batch()).num_stages == 1


def test_partial_and_callable_objects():
    class Step:
        def __call__(self, p, data):
            return sgd(p, data)

    want = sgd(params(), batch(), 0.1)
    assert_trees_same(parallelize(functools.partial(sgd, rate=0.1))(params(), batch()), want)
    f = parallelize(functools.partial(sgd, params()))
    assert_trees_same(f(batch()), want)
    assert f.plan(batch()).content.program == "sgd"
    assert_trees_same(parallelize(Step())(params(), batch()), want)


def test_decorated_with_and_without_arguments():
    @autopar.parallelize
    def a(x):
        return x + 1

    @autopar.parallelize(cluster=CLUSTER)
    def b(x):
        "Doc."
        return x + 1

    assert a(jnp.ones(8))[0] == b(jnp.ones(8))[0] == 2
    assert b.__name__ == "b" and b.__doc__ == "Doc."


def test_inside_other_transformations():
    f = parallelize(sgd)
    want = sgd(params(), batch())
    assert_trees_same(jax.jit(f)(params(), batch()), want)
    assert jax.eval_shape(f, params(), batch())[1].shape == ()
    f(params(), batch())
    assert_trees_same(jax.jit(f)(params(), batch()), want)
    grad = jax.grad(lambda p: f(p, jax.tree.map(jnp.asarray, batch()))[1])(params())
    assert_trees_same(grad, jax.grad(lambda p: sgd(p, batch())[1])(params()))


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda p, loss: (loss, p),
        lambda p, loss: p,
        lambda p, loss: loss,
        lambda p, loss: (p, loss, loss * 2, {"more": [loss]}),
        lambda p, loss: None,
        lambda p, loss: (),
        lambda p, loss: (loss, loss, p["w"], p["w"]),
    ],
    ids=["loss first", "state", "scalar", "four", "nothing", "empty", "twice"],
)
def test_any_structure_of_results(shape):
    same(lambda p, data: shape(*sgd(p, data)), (params(), batch()))


def test_inputs_that_are_outputs_or_unused():
    same(lambda p, unused, x: (x, p, x, p["w"]), (params(), jnp.ones((8, 3)), jnp.ones((8, 2))))


def test_a_result_of_another_dtype_is_a_new_signature():
    def step(state, x):
        return state * jnp.float32(0.5) + x.sum(), x.mean()

    f = parallelize(step)
    state = jnp.ones(8, jnp.bfloat16)
    want = state
    for _ in range(3):
        state, _ = f(state, jnp.ones(8))
        want, _ = step(want, jnp.ones(8))
        assert_trees_same(state, want)
    assert len(f._plain.compiled) == 2


def test_weak_types_stay_weak():
    def step(x, rate):
        return x, rate * 2

    x = jnp.ones(8, jnp.bfloat16)
    _, rate = parallelize(step)(x, 0.5)
    assert (x * rate).dtype == jnp.bfloat16
    assert rate.weak_type == jax.jit(step)(x, 0.5)[1].weak_type


def test_results_are_ordinary_arrays():
    f = parallelize(lambda s, x: {"step": s["step"] + 1, "w": s["w"] * x.mean()})
    got = f({"step": jnp.zeros((), jnp.int32), "w": jnp.ones((8, 8))}, np.ones((16, 2), np.float32))
    assert int(got["step"]) == 1 and got["step"].item() == 1
    assert isinstance(got["w"], jax.Array) and got["w"].is_fully_addressable
    assert float(jax.jit(jnp.sum)(got["w"])) == 64
    assert np.asarray(got["w"]).shape == (8, 8)
    assert (got["w"] + jnp.ones((8, 8))).sum() == 128
    assert list(range(got["step"])) == [0]


@pytest.mark.slow
def test_many_signatures_in_one_process():
    f = parallelize(lambda x, y: (x @ y).sum())
    for n, dtype in itertools.product((4, 5), (jnp.float32, jnp.int32)):
        x = jnp.ones((n, 8), dtype)
        assert f(x, x.T) == (x @ x.T).sum()
    assert len(f._plain.compiled) == 4


def test_64_bit_types_are_another_program():
    def step(x):
        return x + jnp.arange(8).astype(float).sum()

    f = parallelize(step)
    assert f(jnp.ones(8)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(jnp.ones(8, jnp.float32)).dtype == step(jnp.ones(8, jnp.float32)).dtype
