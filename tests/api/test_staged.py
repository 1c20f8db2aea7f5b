"""`.trace`, `.lower`, `.compile`: the steps that `jax.stages` has."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 2}])
def test_trace_lower_compile(options):
    step = autopar.parallelize(sgd, cluster=CLUSTER, **options)
    shapes = jax.eval_shape(lambda: (params(), jax.tree.map(jax.numpy.asarray, batch())))
    traced = step.trace(*shapes)
    want = jax.eval_shape(sgd, *shapes)
    assert traced.fun_name == "sgd"
    assert jax.tree.map(lambda a: (a.shape, a.dtype), traced.out_info) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    lowered = traced.lower()
    assert lowered.plan == step.plan(*shapes)
    assert lowered.as_text().count("module @") == (1 if not options else len(lowered.as_text().split("// ")) - 1)
    compiled = step.lower(*shapes).compile()
    assert_trees_same(compiled(params(), batch()), sgd(params(), batch()))
    shardings = compiled.output_shardings
    assert jax.tree.structure(shardings) == jax.tree.structure(want)
    got = compiled(params(), batch())
    for array, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(shardings), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    costs = compiled.cost_analysis()
    costs = costs if not options else {k: v for c in costs.values() for k, v in c.items()}
    assert costs["flops"] > 0


def product(x, y, scale=2.0, *, mode="plain", flag=True):
    return {"z": x @ y * scale, "n": 3.0}, np.ones(2)


STAGED = {
    "plain": (product, {}, lambda x: ((x, x), {})),
    "by keyword": (product, {"donate_argnums": 0}, lambda x: ((x,), {"y": x, "scale": 3})),
    "static": (
        product,
        {"static_argnames": ("mode", "flag"), "donate_argnames": "y"},
        lambda x: ((x,), {"y": x, "mode": "other", "flag": False}),
    ),
    "static by position": (product, {"static_argnums": 2}, lambda x: ((x, x, 2.5), {})),
    "trees": (lambda s, b: ({"w": s["w"] + b[0], "i": s["i"]}, b), {}, lambda x: (({"w": x, "i": 1}, [x, x]), {})),
}


@pytest.mark.parametrize("name", STAGED)
def test_what_the_steps_to_a_program_tell_is_what_jits_tell(name):
    fn, options, arguments = STAGED[name]
    args, kwargs = arguments(np.ones((8, 8), np.float32))
    ours, jits = autopar.parallelize(fn, cluster=CLUSTER, **options), jax.jit(fn, **options)
    traced, want = ours.trace(*args, **kwargs), jits.trace(*args, **kwargs)
    assert str(traced.jaxpr.in_avals) == str(want.jaxpr.in_avals)
    assert str(traced.jaxpr.out_avals) == str(want.jaxpr.out_avals)
    assert [str(e.primitive) for e in traced.jaxpr.eqns] == [str(e.primitive) for e in want.jaxpr.eqns]
    assert str(traced.out_avals) == str(want.out_avals)
    pairs = [(traced, want), (traced.lower(), want.lower()), (traced.lower().compile(), want.lower().compile())]
    for one, other in pairs:
        for attribute in ("in_tree", "out_tree", "in_avals", "donate_argnums"):
            assert getattr(one, attribute) == getattr(other, attribute), attribute
        assert str(one.args_info) == str(other.args_info)
        got, info = jax.tree.leaves(one.out_info), jax.tree.leaves(other.out_info)
        assert [(s.shape, s.dtype) for s in got] == [(s.shape, s.dtype) for s in info]
    shapes, wanted = ours.eval_shape(*args, **kwargs), jits.eval_shape(*args, **kwargs)
    assert shapes == wanted
    assert jax.eval_shape(lambda x: ours.eval_shape(*args, **kwargs) and x, args[0]) is not None


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"static_argnums": 2}, (0,), {"y": 1, "scale": 2.5}),
        ({"static_argnums": (2,)}, (0, 1, 2.5), {}),
        ({"static_argnums": (0, 2)}, (3.0, 1, 2.5), {}),
        ({"static_argnames": ("mode", "flag")}, (0, 1), {"mode": "other", "flag": False}),
        ({"static_argnames": ("scale", "mode")}, (0, 1, 2.5), {"mode": "other"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_compiled_objects_take_calls_with_and_without_static_arguments(options, args, kwargs):
    arrays = [np.full((4, 4), n, np.float32) for n in (1, 2)]

    def scaled(x, y, scale=2.0, *, mode="plain", flag=True):
        return (x * y).sum() * scale if flag else x * y * scale

    def filled(values):
        return [arrays[v] if type(v) is int else v for v in values]

    args, kwargs = filled(args), dict(zip(kwargs, filled(kwargs.values()), strict=True))
    names = ("x", "y", "scale")
    static = {*np.atleast_1d(options.get("static_argnums", ())).tolist()}
    static |= {names.index(n) for n in options.get("static_argnames", ()) if n in names}
    dynamic = [a for k, a in enumerate(args) if k not in static]
    named = {k: v for k, v in kwargs.items() if isinstance(v, np.ndarray)}
    want = jax.jit(scaled, **options).lower(*args, **kwargs).compile()(*dynamic, **named)
    compiled = autopar.parallelize(scaled, cluster=CLUSTER, **options).lower(*args, **kwargs).compile()
    assert_trees_same(compiled(*dynamic, **named), want)
    assert_trees_same(compiled(*args, **kwargs), want)


def test_programs_as_objects_of_the_compiler():
    lowered = autopar.parallelize(sgd, cluster=CLUSTER).lower(params(), batch())
    assert "stablehlo" in str(lowered.compiler_ir())
    assert "HloModule" in lowered.compiler_ir("hlo").as_hlo_text()
    assert "HloModule" in lowered.as_text("hlo")
    assert "loc(" in lowered.as_text(debug_info=True)
    assert lowered.cost_analysis()["flops"] > 0
    compiled = lowered.compile()
    assert compiled.runtime_executable() is not None
    assert len(jax.tree.leaves(compiled.input_formats)) == len(jax.tree.leaves(compiled.in_avals))
    staged = autopar.parallelize(sgd, cluster=CLUSTER, num_stages=2, num_microbatches=2).lower(params(), batch())
    assert len(staged.compiler_ir()) == staged.as_text().count("// ") > 1
    assert set(staged.cost_analysis()) == set(staged.compiler_ir())


def test_the_jaxpr_is_the_function_as_it_is_written():
    step = autopar.parallelize(sgd, cluster=CLUSTER, precision="bf16", num_microbatches=2)
    assert "bf16" not in str(step.trace(params(), batch()).jaxpr)


def test_a_cleared_cache_traces_again():
    calls = []
    step = autopar.parallelize(lambda x: calls.append(0) or x * 2, cluster=CLUSTER)
    x = np.ones(8, np.float32)
    compiled = step.compile(x)
    assert step(x).sum() == step(x).sum() == 16
    assert len(calls) == 1
    step.clear_cache()
    assert step.plans() == []
    assert compiled(x).sum() == step(x).sum() == 16
    assert len(calls) == 2


def test_options_of_the_compiler():
    """As in jax.stages: an option that XLA does not know is jit's error; those that it knows make a program apart."""
    step = autopar.parallelize(sgd, cluster=CLUSTER)
    lowered, plain = step.lower(params(), batch()), jax.jit(sgd).lower(params(), batch())
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    assert_trees_same(compiled(params(), batch()), sgd(params(), batch()))
    assert lowered.compile() is not compiled
    assert lowered.compile() is lowered.compile() is step.compile(params(), batch())
    for one in (lowered, plain):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            one.compile(compiler_options={"xla_no_such_option": 1})
    staged = autopar.parallelize(sgd, cluster=CLUSTER, num_stages=2, num_microbatches=2).lower(params(), batch())
    with pytest.raises(autopar.AutoparError, match="one stage"):
        staged.compile({"xla_backend_optimization_level": 0})


def test_programs_for_other_platforms_can_be_read():
    traced = autopar.parallelize(lambda x: jax.random.normal(jax.random.key(0), x.shape) * x, cluster=CLUSTER).trace(
        np.ones((8, 8), np.float32)
    )
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert "stablehlo" in lowered.as_text() and "HloModule" in lowered.as_text("hlo")
    assert traced.lower(lowering_platforms=("cpu",)).compile()(np.ones((8, 8), np.float32)).shape == (8, 8)
    assert traced.lower(lowering_platforms=("cpu", "cuda")).as_text().count("module @") == 1
    with pytest.raises(autopar.ClusterError, match="lowered for tpu"):
        lowered.compile()
