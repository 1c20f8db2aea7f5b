"""What compilers compute again for every reader, and so never store."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, parallelize
from autopar.ir import Operator, TensorType, Value
from autopar.ir.primitives import reads_fused
from autopar.search.intra.fusion import CPU_GROWTH, GROWTH, growth_of, is_recomputed


def operator(primitive: str, size: int = 1024) -> Operator:
    return Operator("a.0", primitive, (), (Value("r", TensorType((size,), "f32")),))


@pytest.mark.parametrize(
    ("primitive", "basis_bytes", "growth", "want"),
    [
        ("exp", 2048, CPU_GROWTH, True),  # from a dtype of half the width
        ("exp", 4096, CPU_GROWTH, False),
        ("exp", 4096, GROWTH, True),
        ("mul", 8192, GROWTH, False),  # two operands as large as the result
        ("eq", 0, CPU_GROWTH, True),  # of numbers counted up on the spot
        ("dot_general", 0, GROWTH, False),
        ("reduce_sum", 0, GROWTH, False),
    ],
)
def test_only_elementwise_results_no_smaller_than_what_they_are_made_of(primitive, basis_bytes, growth, want) -> None:
    assert is_recomputed(operator(primitive), basis_bytes, growth) == want


@pytest.mark.slow
def test_sums_read_on_the_fly_and_products_do_not() -> None:
    assert reads_fused(operator("add")) and reads_fused(operator("reduce_max"))
    assert not reads_fused(operator("dot_general"))


def test_processors_keep_more() -> None:
    assert growth_of(Cluster.load("local-cpu")) > growth_of(Cluster.load("dgx-h100"))


def loss(w, x):
    wide = (x @ w).astype(jnp.float32)
    shifted = wide - jnp.max(wide, axis=1, keepdims=True)
    return jnp.sum(jnp.log(jnp.sum(jnp.exp(shifted), axis=1))) + jnp.sum(wide)


def test_a_wide_copy_of_logits_needs_no_memory() -> None:
    shapes = (jax.ShapeDtypeStruct((64, 4096), "bfloat16"), jax.ShapeDtypeStruct((512, 64), "bfloat16"))
    cluster = Cluster.load("dgx-h100")
    plan = parallelize(loss, cluster=cluster, mesh_shape=(8,)).plan(*shapes)
    logits_bytes = 512 * 4096 * 2
    held = plan.stages[0].memory
    assert held.activations + held.temporaries < 2 * logits_bytes
