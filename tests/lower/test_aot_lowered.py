"""Collectives of lowered programs, counted in their jaxprs: exactly those of the plan, loops and branches included."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import autopar
from autopar._compat.meshes import abstract_mesh
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.lower.aot.collectives import counted_collectives
from autopar.lower.program import lower_on
from benchmarks.clusters import bytes_cluster
from examples import gpt, llama, mlp, moe, wide_resnet


def both(step, args, mesh=(2, 4)):
    plan = autopar.parallelize(step, cluster=bytes_cluster(), mesh_shape=mesh, donate_argnums=0).plan(*args)
    pure = PureFunction(step, ParallelOptions(plan=plan))
    traced, plan = pure.plan(pure.resolve(args, {})[0])
    axes = plan.stages[0].mesh_axes
    program = lower_on(traced, plan, abstract_mesh(plan.stages[0].mesh_axes), "cpu")
    lowered, _ = counted_collectives(program.function, program.shapes(traced), axes)
    said: Counter[tuple[str, str, int]] = Counter()
    for r in plan.communication:
        said[r.kind, "+".join(a for a, _ in axes if a in r.axis.split("+")), r.bytes] += r.count
    return dict(said), lowered


def looped(w, x):
    def loss(w):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x, w)
        return jnp.sum(h**2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def test_a_scan_counts_its_trips() -> None:
    said, lowered = both(
        looped, (jax.ShapeDtypeStruct((6, 64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32"))
    )
    assert said == lowered
    assert any(n >= 6 for n in lowered.values())


EXAMPLES = [
    pytest.param(m, id=m.__name__, marks=() if m is mlp else pytest.mark.slow)
    for m in (mlp, gpt, llama, moe, wide_resnet)
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_are_lowered_to_the_predicted_collectives(module) -> None:
    said, lowered = both(*module.build("tiny", abstract=True))
    assert said and said == lowered


def test_collectives_that_do_the_same_are_counted() -> None:
    mesh = AbstractMesh((4,), ("x",), (AxisType.Auto,))

    def body(a):
        gathered = [jax.lax.all_gather(jnp.tanh(v), "x", tiled=True) for v in (a, a, 2 * a)]
        return sum(gathered)

    function = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec(), check_vma=False)
    found, equal = counted_collectives(function, [jax.ShapeDtypeStruct((8,), "float32")], (("x", 4),))
    assert found == {("all-gather", "x", 32): 3.0}
    assert equal == {("all-gather", "x", 32): 1.0}


def test_sums_that_are_added_up_can_be_one() -> None:
    mesh = AbstractMesh((4,), ("x",), (AxisType.Auto,))

    def body(a, b):
        halves = [jax.lax.psum_scatter(v, "x", tiled=True) for v in (a, b)]
        other = jax.lax.psum_scatter(a * b, "x", tiled=True)
        return halves[0] + halves[1], other

    shapes = [jax.ShapeDtypeStruct((8,), "float32")] * 2
    spec = PartitionSpec()
    function = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec("x"), check_vma=False)
    found, equal = counted_collectives(function, shapes, (("x", 4),))
    assert found == {("reduce-scatter", "x", 32): 3.0}
    assert equal == {("reduce-scatter", "x", 32): 1.0}
