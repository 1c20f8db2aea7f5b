"""Products in blocks of drawn shapes against gathers, sums and whole products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from autopar.ir import Layout, Operator, TensorType, Value
from autopar.lower.collective_matmul import BlockProduct
from autopar.lower.hlo import collectives
from autopar.lower.localize.base import LocalContext
from autopar.sharding.collective_matmul import gathered_matmul, scattered_matmul
from autopar.sharding.reshard import ReshardStep

#: The programs run once: optimizing them takes longer than it saves.
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Product = tuple[str, str, dict[str, int], int, str]


@st.composite
def products(draw: Any) -> Product:
    """(labels of the left, of the right, sizes by label, devices, the label that they split)."""
    lhs, rhs = "".join(draw(st.permutations("abkm"))), "".join(draw(st.permutations("abkn")))
    devices = draw(st.sampled_from((2, 4, 8)))
    label = draw(st.sampled_from("akmn"))
    sizes = {k: draw(st.integers(1, 3)) for k in "abkmn"}
    return lhs, rhs, sizes | {label: devices * sizes[label]}, devices, label


def operator(lhs: str, rhs: str, sizes: dict[str, int], dtype: str = "f64") -> tuple[Operator, tuple[TensorType, ...]]:
    """The product of two tensors: a and b are batch dims, k is summed."""
    numbers = (
        ((lhs.index("k"),), (rhs.index("k"),)),
        (tuple(lhs.index(c) for c in "ab"), tuple(rhs.index(c) for c in "ab")),
    )
    result = result_labels(lhs, rhs)
    types = tuple(TensorType(tuple(sizes[c] for c in of), dtype) for of in (lhs, rhs, result))
    op = Operator("dot", "dot_general", ("x", "y"), (Value("z", types[2]),), (("dimension_numbers", numbers),))
    return op, types[:2]


def result_labels(lhs: str, rhs: str) -> str:
    return "ab" + "".join(c for c in lhs if c == "m") + "".join(c for c in rhs if c == "n")


def split(labels: str, label: str) -> Layout:
    return Layout(tuple(("x",) if c == label else () for c in labels))


def spec(labels: str, label: str) -> PartitionSpec:
    return PartitionSpec(*("x" if c == label else None for c in labels))


def block_product(op: Operator, types: tuple[TensorType, ...], devices: int, *, in_steps: bool = False) -> BlockProduct:
    """The product of whole operands, made by `lax`."""
    result = op.results[0].type
    layouts = tuple(Layout.replicated(t.rank) for t in types)
    context = LocalContext({"x": devices}, types, (result,), layouts, (Layout.replicated(result.rank),))
    numbers: Any = op.attr("dimension_numbers")

    def apply(x: Any, y: Any, dtype: Any = None) -> Any:
        return lax.dot_general(x, y, numbers, preferred_element_type=dtype)

    return BlockProduct(op, context, ("x",), apply, in_steps)


def drawn(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def on_devices(devices: int, body: Any, in_specs: Any, out_specs: Any, *args: Any) -> Any:
    """The compiled program."""
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    return run.lower(*args).compile(compiler_options=QUICK)


@settings(max_examples=5, deadline=None)
@given(products(), st.sampled_from((0, 1)), st.booleans())
def test_a_gathered_operand(product: Product, operand: int, in_steps: bool) -> None:
    """The product, and the operand as a gather would leave it; n - 1 messages of a block each, and no gather."""
    lhs, rhs, sizes, devices, label = product
    labels = (lhs, rhs)
    if label not in labels[operand]:
        operand = 1 - operand
    with jax.enable_x64(True):
        op, types = operator(lhs, rhs, sizes)
        step = ReshardStep("all-gather", ("x",), labels[operand].index(label))
        how = gathered_matmul(op, [t.rank for t in types], operand, step, ("x",))
        assert how is not None and (how.result_dim < 0) == (label == "k")

        def body(block: Any, other: Any) -> Any:
            made = block_product(op, types, devices, in_steps=in_steps)
            whole = made.gathered(operand, other)(step, block)
            return made.result, whole

        given_operands = [drawn(*types[n].shape, seed=n) for n in (operand, 1 - operand)]
        specs = (spec(labels[operand], label), PartitionSpec())
        run = on_devices(devices, body, specs, (PartitionSpec(), PartitionSpec()), *given_operands)
        result, whole = run(*given_operands)
        expected = jnp.einsum(f"{labels[operand]},{labels[1 - operand]}->{result_labels(lhs, rhs)}", *given_operands)
        np.testing.assert_allclose(result, expected, 1e-10, 1e-10)
        np.testing.assert_array_equal(whole, given_operands[0])
        sent = collectives(run.as_text())
        block_bytes = given_operands[0].nbytes // devices
        assert {c.kind for c in sent} == {"collective-permute"}
        assert [c.full_bytes for c in sent] == [block_bytes] * (devices - 1)


@settings(max_examples=5, deadline=None)
@given(products(), st.booleans())
def test_a_sum_that_is_scattered(product: Product, in_steps: bool) -> None:
    """Each device's block of the sum of products of all devices; n - 1 messages of a block."""
    lhs, rhs, sizes, devices, label = product
    if label == "k":
        return
    with jax.enable_x64(True):
        op, types = operator(lhs, rhs, sizes)
        labels = result_labels(lhs, rhs)
        step = ReshardStep("reduce-scatter", ("x",), labels.index(label))
        assert scattered_matmul(op, [t.rank for t in types], step, ("x",)) is not None

        def body(x: Any, y: Any) -> Any:
            return block_product(op, types, devices, in_steps=in_steps).unmade(x[0], y[0]).scattered(step)

        x, y = (drawn(devices, *t.shape, seed=n) for n, t in enumerate(types))
        run = on_devices(devices, body, PartitionSpec("x"), spec(labels, label), x, y)
        expected = jnp.einsum(f"z{lhs},z{rhs}->{labels}", x, y)
        np.testing.assert_allclose(run(x, y), expected, 1e-10, 1e-10)
        sent = collectives(run.as_text())
        assert {c.kind for c in sent} == {"collective-permute"}
        assert [c.full_bytes for c in sent] == [expected.nbytes // devices] * (devices - 1)


def test_narrow_products_are_added_in_float32() -> None:
    """Of a dim that is summed: bfloat16 results are rounded once, as those of the whole product."""
    op, types = operator("abmk", "abkn", {"a": 1, "b": 1, "m": 8, "k": 512, "n": 8}, "bf16")
    step = ReshardStep("all-gather", ("x",), 3)

    def body(block: Any, other: Any) -> Any:
        made = block_product(op, types, 8)
        made.gathered(0, other)(step, block)
        return made.result

    x, y = (drawn(*t.shape, seed=n).astype(jnp.bfloat16) for n, t in enumerate(types))
    result = on_devices(8, body, (spec("abmk", "k"), PartitionSpec()), PartitionSpec(), x, y)(x, y)
    exact = np.einsum("abmk,abkn->abmn", np.asarray(x, np.float64), np.asarray(y, np.float64))
    assert result.dtype == jnp.bfloat16
    assert np.max(np.abs(np.asarray(result, np.float64) - exact) / np.abs(exact)) < 2**-8


@pytest.mark.parametrize(
    "step",
    [
        ReshardStep("all-gather", ("y", "x"), 0),  # not in the order of the mesh
        ReshardStep("all-gather", ("x",), 0, wire="int8"),
        ReshardStep("all-to-all", ("x",), 0, 1),
        ReshardStep("reduce-scatter", ("x",), 0, reduce="max"),
    ],
)
def test_other_steps_have_no_such_form(step: ReshardStep) -> None:
    op, types = operator("abmk", "abkn", dict.fromkeys("abkmn", 8))
    ranks = [t.rank for t in types]
    assert gathered_matmul(op, ranks, 0, step, ("x", "y")) is None
    assert scattered_matmul(op, ranks, step, ("x", "y")) is None
