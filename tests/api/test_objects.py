"""A decorated function as an object: copied, pickled, referred to weakly; methods; static values that change."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER

X = np.arange(8, dtype=np.float32)


def doubled(x):
    return x * 2


@autopar.parallelize(cluster=CLUSTER)
def tripled(x):
    return x * 3


doubles = autopar.parallelize(doubled, cluster=CLUSTER, constraints={"x": (0,)})


class Model:
    """Holds a number that its methods use."""

    made = 0

    def __init__(self, k=2):
        self.k = k

    def __hash__(self):
        return hash(self.k)

    def __eq__(self, other):
        return isinstance(other, Model) and self.k == other.k

    @autopar.parallelize(cluster=CLUSTER)
    def scaled(self, x):
        return x * self.k

    @staticmethod
    @autopar.parallelize(cluster=CLUSTER)
    def static(x):
        return x + 1

    @classmethod
    @autopar.parallelize(cluster=CLUSTER)
    def of_class(cls, x):
        return x + cls.made

    part = functools.partialmethod(autopar.parallelize(lambda self, a, x: x * a * self.k, cluster=CLUSTER), 3.0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_share_programs(copied):
    step = autopar.parallelize(doubled, cluster=CLUSTER)
    step(X)
    holder = copied({"step": step, "n": [1]})
    np.testing.assert_array_equal(holder["step"](X), X * 2)
    assert len(holder["step"].plans()) == 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_by_name_or_by_function_and_options(protocol):
    tripled(X)
    assert pickle.loads(pickle.dumps(tripled, protocol)) is tripled
    again = pickle.loads(pickle.dumps(autopar.parallelize(doubled, cluster=CLUSTER, constraints={"x": (0,)}), protocol))
    assert again.options.constraints == doubles.options.constraints
    np.testing.assert_array_equal(again(X), X * 2)
    assert again.plan(X) == doubles.plan(X)


def test_pickled_with_default_options_and_with_a_plan():
    step = pickle.loads(pickle.dumps(autopar.parallelize(doubled)))
    np.testing.assert_array_equal(step(X), X * 2)
    planned = pickle.loads(pickle.dumps(autopar.parallelize(doubled, plan=doubles.plan(X))))
    assert planned.plan(X) == doubles.plan(X)


@pytest.mark.parametrize("stage", ["trace", "lower", "compile"])
def test_objects_of_a_call_are_shared_by_copies_and_are_not_pickled(stage):
    call = getattr(doubles, stage)(X)
    holder = copy.deepcopy({"call": call, "seen": [1]})
    assert holder["call"] is call is copy.copy(call)
    with pytest.raises(TypeError, match="cannot be pickled") as caught:
        pickle.dumps(holder)
    assert isinstance(caught.value, autopar.AutoparError)


@pytest.mark.slow
def test_a_weak_reference_lets_go():
    step = autopar.parallelize(lambda x: x + 1, cluster=CLUSTER)
    step(X)
    gone = []
    weakref.finalize(step, gone.append, 1)
    assert weakref.ref(step)() is step
    del step
    gc.collect()
    assert gone == [1]


def test_arrays_that_a_function_closes_over_are_freed_with_it_before_the_collector_runs():
    held = jnp.ones(16)
    step = (lambda held: autopar.parallelize(lambda x: x + held, cluster=CLUSTER))(held)
    step(jnp.ones(16))
    step(jnp.ones(16))
    reference = weakref.ref(held)
    gc.disable()
    try:
        del held, step
        assert reference() is None
    finally:
        gc.enable()


def test_methods():
    model = Model()
    np.testing.assert_array_equal(model.scaled(X), X * 2)
    np.testing.assert_array_equal(Model.static(X), X + 1)
    np.testing.assert_array_equal(model.static(X), X + 1)
    np.testing.assert_array_equal(Model.of_class(X), X)
    np.testing.assert_array_equal(model.part(X), X * 6)
    assert model.scaled == model.scaled != Model().scaled
    assert len({model.scaled, model.scaled}) == 1
    assert model.scaled.__self__ is model
    assert model.scaled.__func__ is Model.scaled
    assert model.scaled.eval_shape(X).shape == (8,)
    assert model.scaled.lower(X).compile()(model, X)[1] == 2
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model.scaled))(X), X * 2)
    assert jax.jit(model.scaled)(X)[1] == 2
    model.scaled.clear_cache()
    assert model.scaled.plans() == []


def test_partials():
    inner = functools.partial(lambda a, x, b=0: a * x + b, 2.0, b=1.0)
    np.testing.assert_array_equal(autopar.parallelize(inner, cluster=CLUSTER)(X), 2 * X + 1)
    outer = functools.partial(autopar.parallelize(lambda a, x: a * x, cluster=CLUSTER), np.float32(3))
    np.testing.assert_array_equal(outer(X), X * 3)
    np.testing.assert_array_equal(autopar.parallelize(outer, cluster=CLUSTER)(X), X * 3)
    np.testing.assert_array_equal(autopar.parallelize(Model(5).scaled, cluster=CLUSTER)(X), X * 5)
    tree = jax.tree_util.Partial(lambda a, x: a * x, 4.0)
    np.testing.assert_array_equal(autopar.parallelize(lambda f, x: f(x), cluster=CLUSTER)(tree, X), X * 4)


class Setting(Model):
    """One whose hash is that of what it says now."""


def test_static_arguments_that_change():
    step = autopar.parallelize(lambda m, x: x * m.k, cluster=CLUSTER, static_argnums=0)
    setting = Setting()
    for k in (2, 3, 2, 5):
        setting.k = k
        assert [float(step(setting, X)[1]) for _ in range(2)] == [k, k]
    assert float(step(Setting(3), X)[1]) == 3


def test_static_leaves_that_change():
    step = autopar.parallelize(lambda tree, x: x * tree["m"].k, cluster=CLUSTER)
    setting = Setting()
    for k in (2, 3, 2, 5):
        setting.k = k
        assert [float(step({"m": setting}, X)[1]) for _ in range(3)] == [k] * 3


def test_methods_of_objects_that_change():
    model = Model()
    for k in (2, 3, 2):
        model.k = k
        assert [float(model.scaled(X)[1]) for _ in range(3)] == [k] * 3


def test_functions_of_a_closure_are_values():
    step = autopar.parallelize(lambda f, x: f(x), cluster=CLUSTER, static_argnums=0)
    assert float(step(jnp.sin, X)[0]) == 0
    assert float(step(jnp.cos, X)[0]) == 1
