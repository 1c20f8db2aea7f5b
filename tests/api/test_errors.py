"""Wrong use is answered with typed errors that say what to do."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.clusters import toy

parallelize = functools.partial(autopar.parallelize, cluster=CLUSTER)


def branches(x):
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize(
    "fn",
    [
        branches,
        lambda x: np.asarray(x) * 2,
        lambda x: x * int(x[0]),
        lambda x: jnp.ones(x.astype(int)[0]),
        lambda x: x[x > 0],
        lambda x: [i for i in range(x[0].astype(int))],
    ],
    ids=["if", "numpy", "int", "shape", "mask", "range"],
)
def test_a_function_that_cannot_be_traced_names_the_line(fn):
    with pytest.raises(autopar.TraceError, match=r"at: test_errors.py:\d+") as caught:
        parallelize(fn)(jnp.ones(8))
    assert "remedy" in str(caught.value)


def _with_an_attribute_that_jax_traces(x):
    kept = jax.lax.composite(lambda x, **_: jnp.sin(x), "my.sine")
    return kept(x, table=jnp.zeros(2))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.tolist(), "The tolist() method was called on traced array"),
        (lambda x: jnp.zeros(x), "Shapes must be 1D sequences of concrete values of integer type"),
        (lambda x: jnp.ravel_multi_index((x.astype(int),), (9,)), "Use mode='wrap' or mode='clip' instead."),
        (_with_an_attribute_that_jax_traces, "If you are passing jax arrays as attributes, use numpy arrays instead."),
    ],
)
def test_errors_of_tracing_have_the_words_and_the_type_of_jax(fn, words):
    with pytest.raises(Exception, match=re.escape(words)) as of_jit:
        jax.jit(fn)(jnp.ones(8))
    with pytest.raises(autopar.TraceError, match=re.escape(words)) as caught:
        parallelize(fn)(jnp.ones(8))
    assert isinstance(caught.value, of_jit.type)
    assert "make_jaxpr" not in str(caught.value) and "See https" not in str(caught.value)


def test_symbolic_shapes_and_exports_are_told_to_go_without_a_plan():
    step = parallelize(lambda x: x + 1)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a"), jnp.float32)
    with pytest.raises(autopar.TraceError, match="symbolic shape"):
        step.trace(symbolic)
    with pytest.raises(autopar.TraceError, match=r"jax\.export does not write"):
        jax.export.export(step)(jax.ShapeDtypeStruct((8,), jnp.float32))
    exported = jax.export.export(jax.jit(step))(symbolic)
    assert exported.call(jnp.ones(5)).shape == (5,)


def _by_position(a, /, *args, **kwargs):
    return a


def _generates(x):
    yield x


class _Convertible:
    def __jax_array__(self):
        return jnp.arange(8)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda decorate: decorate(_by_position, static_argnames="a"),
        lambda decorate: decorate(_by_position, donate_argnames=("b", "args")),
        lambda decorate: decorate(_generates),
        lambda decorate: decorate(lambda x: x)(_Convertible()),
        lambda decorate: jax.vmap(decorate(lambda x: x + 4).lower(1.0).compile())(jnp.ones(3)),
        lambda decorate: jax.jit(decorate(lambda x: x + 4).lower(1.0).compile())(1.0),
    ],
)
def test_what_jit_refuses_is_refused_with_its_type(wrong):
    with pytest.raises((TypeError, ValueError)) as of_jit:
        wrong(jax.jit)
    with pytest.raises(of_jit.type) as caught:
        wrong(parallelize)
    assert not isinstance(caught.value, jax.errors.JAXTypeError)


def test_attributes_of_the_function_are_those_of_the_decorated_one():
    def step(x):
        return x

    step.version, step.plan = 4, "not the method"
    assert parallelize(step).version == 4
    assert callable(parallelize(step).plan)


def test_the_users_own_error_is_passed_on():
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        parallelize(step)(jnp.ones(8))
    with pytest.raises(TypeError, match=r"dot_general|shapes"):
        parallelize(lambda x, n: x @ jnp.ones(3) * n)(jnp.ones(8), 2)


def test_arguments_that_cannot_be_hashed():
    class Odd:
        __hash__ = None

    with pytest.raises(autopar.TraceError, match="hash"):
        parallelize(lambda x, odd: x)(jnp.ones(8), Odd())
    with pytest.raises(autopar.TraceError, match="hash"):
        parallelize(lambda x, odd: x, static_argnums=1)(jnp.ones(8), [1])


def test_unknown_cluster():
    with pytest.raises(autopar.ClusterError, match="no-such-cluster"):
        autopar.Cluster.load("no-such-cluster")
    with pytest.raises(autopar.ClusterError, match="did you mean 'dgx-a100'"):
        autopar.parallelize(sgd, cluster="dgx-a100-80")


def test_unknown_search():
    with pytest.raises(autopar.AutoparError, match="no-such-search"):
        parallelize(sgd, search="no-such-search").plan(params(), batch())


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnames": "nothing"}, {"donate_argnames": "nothing"}, {"static_argnums": 7}, {"donate_argnums": -9},
        {"static_argnums": 1, "donate_argnums": 1}, {"memory_limit": "much"}, {"memory_limit": 0},
        {"num_stages": 0}, {"schedule": "2f2b"}, {"batch_argnums": "x"}, {"plan": "plan.json"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options(options):
    with pytest.raises(autopar.AutoparError):
        autopar.parallelize(sgd, **options)


def test_not_a_function():
    with pytest.raises(autopar.AutoparError, match="takes a function"):
        autopar.parallelize(3)


def test_a_plan_for_another_program():
    plan = parallelize(sgd).plan(params(), batch())
    with pytest.raises(autopar.PlanMismatchError, match="the plan was made for sgd"):
        parallelize(sgd, plan=plan)(params(), batch(8))
    with pytest.raises(autopar.PlanMismatchError):
        parallelize(branches, plan=plan)  # of no use, but no error before a call
        parallelize(lambda x: x, plan=plan)(jnp.ones(8))


def test_a_plan_for_another_number_of_devices():
    plan = autopar.parallelize(sgd, cluster=toy(devices=4)).plan(params(), batch())
    with pytest.raises(autopar.PlanMismatchError, match="4 devices"):
        autopar.parallelize(sgd, plan=plan)(params(), batch())
    with pytest.raises(autopar.ClusterError, match="4 devices"):
        autopar.parallelize(sgd, cluster=toy(devices=4))(params(), batch())


def test_a_plan_that_was_saved_runs(tmp_path):
    parallelize(sgd).plan(params(), batch()).save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    got = autopar.parallelize(sgd, plan=plan)(params(), batch())
    np.testing.assert_allclose(got[1], sgd(params(), batch())[1], rtol=1e-6)


@pytest.mark.slow
def test_a_memory_limit_that_is_too_small_says_what_would_do():
    p, data = params(hidden=256), batch(64, hidden=256)
    with pytest.raises(autopar.InfeasiblePlanError) as caught:
        parallelize(sgd, memory_limit=3000).plan(p, data)
    least = caught.value.least_bytes
    assert least > 3000 and str(least) in str(caught.value)
    plan = parallelize(sgd, memory_limit=least).plan(p, data)
    assert plan.peak_memory <= least
    with pytest.raises(autopar.InfeasiblePlanError):
        parallelize(sgd, memory_limit=least - 1).plan(p, data)


def test_a_batch_that_no_axis_divides():
    with pytest.raises(autopar.InfeasiblePlanError, match="13"):
        parallelize(sgd, search="data-parallel").plan(params(), batch(13))
    with pytest.raises(autopar.InfeasiblePlanError, match="13"):
        parallelize(sgd, search="data-parallel")(params(), batch(13))
    f = parallelize(lambda x, p: (x * p).sum())
    x = np.ones((13, 7), np.float32)
    assert f(x, 2.0) == 182
    assert any("x f32[13,7] is whole" in note for note in f.plan(x, 2.0).notes)


def test_shapes_plan_but_do_not_run():
    f = parallelize(sgd)
    shapes = jax.eval_shape(lambda: (params(), jax.tree.map(jnp.asarray, batch())))
    assert f.plan(*shapes) == f.plan(params(), batch())
    with pytest.raises(autopar.AutoparError, match="ShapeDtypeStruct"):
        f(*shapes)


def test_compiled_refuses_other_arguments():
    compiled = parallelize(sgd).compile(params(), batch())
    np.testing.assert_allclose(compiled(params(), batch())[1], sgd(params(), batch())[1], rtol=1e-6)
    with pytest.raises(autopar.AutoparError, match="other arguments"):
        compiled(params(), batch(8))


def accumulated(p, x):
    """Gradients of four parts of the batch, added up in a loop of the user's own."""

    def add(total, part):
        loss, g = jax.value_and_grad(perceptron)(p, part)
        return jax.tree.map(jnp.add, total, g), loss

    total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), x.reshape(4, -1, 16))
    return jax.tree.map(lambda w, g: w - 0.1 * g / 4, p, total), losses.mean()


def perceptron(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_a_loop_that_adds_up_gradients_runs_in_stages():
    p, x = [jnp.eye(16)] * 4, jnp.linspace(-1, 1, 512).reshape(32, 16)
    got, want = parallelize(accumulated, num_stages=2, num_microbatches=4)(p, x), accumulated(p, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def local_steps(p, x):
    """A step of gradient descent on each of four parts of the batch, in a loop of the user's own."""

    def step(p, part):
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(perceptron)(p, part)), None

    return jax.lax.scan(step, p, x.reshape(4, -1, 16))[0]


def test_a_loop_whose_parts_need_each_other_names_itself_in_stages():
    p, x = [jnp.eye(16)] * 4, jnp.linspace(-1, 1, 512).reshape(32, 16)
    with pytest.raises(autopar.InfeasiblePlanError, match="inside of a loop") as caught:
        parallelize(local_steps, num_stages=2, num_microbatches=4).plan(p, x)
    assert "num_microbatches=4" in caught.value.remedy
    assert "local_steps" in caught.value.source


def test_such_a_loop_in_python_is_named_too():
    def chunks(p, x):
        total = jax.tree.map(jnp.zeros_like, p)
        for part in x.reshape(4, -1, 16):  # each part needs the one before
            total = jax.tree.map(jnp.add, total, jax.grad(perceptron)(p, part + total[0][0]))
        return jax.tree.map(lambda w, g: w - 0.1 * g / 4, p, total)

    p, x = [jnp.eye(16)] * 4, jnp.linspace(-1, 1, 512).reshape(32, 16)
    with pytest.raises(autopar.InfeasiblePlanError, match="run 4 times") as caught:
        parallelize(chunks, num_stages=2).plan(p, x)
    assert "num_microbatches=4" in caught.value.remedy


@pytest.mark.parametrize("remat", ["full", "auto"])
def test_a_limit_that_fixed_recomputation_does_not_keep_names_the_free_one(remat):
    with pytest.raises(autopar.InfeasiblePlanError) as caught:
        parallelize(sgd, memory_limit=200, remat=remat, num_stages=1).plan(params(), batch())
    assert ("remat='auto'" in caught.value.remedy) == (remat == "full")
