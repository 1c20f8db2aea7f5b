"""Strategies and sharding rules that users add."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar.search.registry as registry
from autopar import hooks, parallelize
from autopar.errors import AutoparError
from autopar.search import alpa, register, strategies, strategy_named
from autopar.sharding import Factor, Rule, register_rule, unregister_rule
from tests.end_to_end.compare import assert_same
from tests.search.problems import f32, toy


@pytest.fixture
def fresh(monkeypatch):
    """Registrations of one test only."""
    monkeypatch.setattr(registry, "_REGISTRY", registry.built_in())


def test_built_in_names():
    assert {"alpa", "data-parallel", "replicated"} <= set(strategies())
    assert list(strategies()) == sorted(strategies())
    assert strategy_named("alpa") is alpa


def test_a_registered_strategy_is_found(fresh):
    asked = []

    @register("mine")
    def mine(problem):
        asked.append(problem)
        return alpa(problem)

    assert "mine" in strategies()
    assert strategy_named("mine") is mine
    plan = parallelize(lambda x: jnp.tanh(x), cluster=toy(4), search="mine").plan(f32(8, 8))
    assert len(asked) == 1
    assert asked[0].cluster.num_devices == 4
    assert plan.step_time > 0


def test_names_that_are_known_need_no_look_at_installed_packages(fresh, monkeypatch):
    register("mine")(alpa)
    monkeypatch.setattr(hooks, "entry_points", lambda **_: pytest.fail("files of all packages were read"))
    assert strategy_named("mine") is strategy_named("alpa") is alpa


def test_a_registered_strategy_hides_a_built_in_one(fresh):
    @register("replicated")
    def other(problem):
        return alpa(problem)

    assert strategy_named("replicated") is other
    assert strategies().count("replicated") == 1


def test_a_strategy_need_not_be_registered():
    plan = parallelize(lambda x: jnp.tanh(x), cluster=toy(4), search=strategy_named("replicated")).plan(f32(8, 8))
    assert plan.content.inputs[0].layout == "[.,.]"


@pytest.mark.parametrize(("name", "near"), [("alpha", "alpa"), ("data_parallel", "data-parallel"), ("", "alpa")])
def test_an_unknown_name_lists_others(name, near):
    with pytest.raises(AutoparError, match="no search strategy is called") as caught:
        strategy_named(name)
    assert near in str(caught.value)
    with pytest.raises(AutoparError, match="no search strategy is called"):
        parallelize(lambda x: x + 1, cluster=toy(4), search=name).plan(f32(8))


def plain(x, y):
    """What the primitive of the tests computes: rows scaled by what they sum to."""
    return x * jnp.sum(y, axis=-1, keepdims=True)


@pytest.fixture
def scale_rows():
    """A primitive that autopar does not know, of two ``[n, m]`` arrays; differentiable in neither."""
    primitive = Primitive("scale_rows")
    primitive.def_impl(jax.jit(plain))
    primitive.def_abstract_eval(lambda x, y: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    return primitive


def rule(op, operand_types):
    """Rows go anywhere; a row of the second operand stays whole, and so does one of the first."""
    rows = operand_types[0].shape[0]
    return Rule((Factor(rows),), ((0, None), (0, None)), ((0, None),))


def arrays(*shapes):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def test_a_rule_for_a_primitive_of_ones_own(scale_rows):
    def fn(x, y):
        return jnp.tanh(scale_rows.bind(jnp.sin(x), y * 2.0))

    args = arrays((64, 32), (64, 32))
    slow = toy(8, memory_bandwidth=1e6)
    unknown = assert_same(fn, args, cluster=slow).plan(*args)
    assert any("scale_rows has no sharding rule" in note for note in unknown.notes)
    whole = next(r for r in unknown.content.operators if "scale_rows" in r.id)
    assert whole.results == ("[.,.]",)

    register_rule("scale_rows", rule)
    try:
        function = assert_same(fn, args, cluster=slow)
        plan = function.plan(*args)
        assert not plan.notes
        split = next(r for r in plan.content.operators if "scale_rows" in r.id)
        axes = "+".join(plan.stages[0].mesh_shape)
        assert split.operands == (f"[{axes},.]",) * 2
        assert split.results == (f"[{axes},.]",)
        assert not plan.communication
        assert plan.step_time < unknown.step_time
        result = function(*args)
        assert {s.data.shape for s in result.addressable_shards} == {(8, 32)}
    finally:
        unregister_rule("scale_rows")
    again = parallelize(fn, cluster=slow).plan(*args)
    assert again.content.operators == unknown.content.operators


def test_a_rule_that_does_not_fit(scale_rows):
    register_rule("scale_rows", lambda op, types: Rule((Factor(64),), ((0,),), ((0,),)))
    try:
        with pytest.raises(AutoparError, match="the rule of scale_rows labels"):
            parallelize(lambda x, y: scale_rows.bind(x, y), cluster=toy(8)).plan(f32(64, 32), f32(64, 32))
    finally:
        unregister_rule("scale_rows")
