"""`.trace`, `.lower`, `.compile`: the steps that `jax.stages` has."""

from __future__ import annotations

import jax
import pytest

import autopar
from tests.api.steps import CLUSTER, batch, params, sgd
from tests.end_to_end.compare import assert_trees_same


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
