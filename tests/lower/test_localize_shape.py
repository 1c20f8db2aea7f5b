"""Primitives that move elements, in every strategy."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar._compat.primitives import optimization_barrier_p
from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def splits(strategies: list[Any]) -> set[str]:
    return {str(s.result_layouts[0]) for s in strategies}


@pytest.mark.parametrize(
    ("source", "target"),
    [((8, 16), (8, 4, 4)), ((4, 2, 6), (8, 6)), ((8, 4), (4, 8)), ((1, 8, 4), (8, 1, 2, 2)), ((), (1, 1))],
)
def test_reshape(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    check_localized(lambda x: lax.reshape(x, target), ints(*source), primitive="reshape", meshes=X)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data())
def test_reshape_of_any_shape(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([16, 24, 32]))
    shapes = [s for r in (1, 2, 3) for s in itertools.product((1, 2, 3, 4, 6, 8, 16), repeat=r) if np.prod(s) == size]
    source, target = data.draw(st.permutations(shapes))[:2]
    meshes = [data.draw(st.sampled_from(MESHES))]
    check_localized(
        lambda x: lax.reshape_p.bind(x, new_sizes=target, dimensions=None, sharding=None),
        ints(*source),
        meshes=meshes,
    )


def test_reshape_with_permutation_is_whole() -> None:
    case = case_of(lambda x: lax.reshape(x, (8,), dimensions=(1, 0)), ints(2, 4))
    assert not case.rule.factors


def test_transpose() -> None:
    ran = check_localized(lambda x: lax.transpose(x, (2, 0, 1)), ints(8, 4, 2), meshes=X, limit=30)
    assert any(s.split == 8 for s in ran)


def test_squeeze() -> None:
    ran = check_localized(lambda x: lax.squeeze(x, (0, 2)), ints(1, 8, 1, 4), meshes=X)
    assert "[x,y]" in splits(ran)


@pytest.mark.parametrize(
    ("shape", "target", "dims"),
    [((), (8, 4), ()), ((4,), (8, 4), (1,)), ((8, 1), (8, 4), (0, 1)), ((1,), (8, 1), (1,)), ((8,), (8, 3, 4), (0,))],
)
def test_broadcast(shape: tuple[int, ...], target: tuple[int, ...], dims: tuple[int, ...]) -> None:
    ran = check_localized(lambda x: lax.broadcast_in_dim(x, target, dims), floats(*shape), meshes=X, limit=30)
    assert any(s.split == 8 for s in ran)
    assert any(s.result_layouts[0].partial for s in ran)


def test_broadcast_of_a_literal_zero() -> None:
    ran = check_localized(lambda: lax.broadcast(np.float32(0), (8, 4)), meshes=X)
    assert "[.,.]+sum(x,y)" in splits(ran)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.int8, jnp.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_iota(dtype: Any, dim: int) -> None:
    # 320 is more than an i8 holds, and bf16 rounds above 256: pieces must wrap and round like the whole.
    shape = (320, 4) if dim == 0 else (4, 320)
    ran = check_localized(lambda: lax.broadcasted_iota(dtype, shape, dim), primitive="iota", meshes=X)
    assert any(s.split == 8 for s in ran)


@pytest.mark.parametrize("count", [2, 3])
def test_concatenate(count: int) -> None:
    parts = [floats(8, n + 1) for n in range(count)]
    ran = check_localized(lambda *p: lax.concatenate(p, 1), *parts, primitive="concatenate", meshes=X)
    assert "[x,.]+sum(y)" in splits(ran)


def test_pad() -> None:
    config = ((0, 0, 0), (1, 2, 1), (0, 0, 0))
    ran = check_localized(lambda x: lax.pad(x, np.float32(0), config), floats(8, 3, 4), primitive="pad", meshes=X)
    assert "[x,.,y]" in splits(ran)
    assert not any(s.operand_layouts[0].dims[1] for s in ran)
    case = case_of(lambda x: lax.pad(x, np.float32(0), config), floats(8, 3, 4))
    assert case.rule.linear == ((0,),)


def test_pad_with_a_value() -> None:
    ran = check_localized(
        lambda x, v: lax.pad(x, v, ((0, 0, 0), (-1, 0, 0))), floats(8, 4), np.float32(3), primitive="pad", meshes=X
    )
    assert all(bool(s.operand_layouts[0].partial) == bool(s.operand_layouts[1].partial) for s in ran)
    assert any(s.operand_layouts[1].partial for s in ran)


def test_slice() -> None:
    ran = check_localized(
        lambda x: lax.slice(x, (0, 1, 0, 0), (8, 3, 4, 4), (1, 1, 1, 2)), ints(8, 4, 4, 4), meshes=X, primitive="slice"
    )
    assert "[x,.,y,.]" in splits(ran)
    # Elements 1 and 2 of 4 are at hand on two devices, 0 and 2 are as well; four devices have fewer than one each.
    kept = {tuple(a for a in s.operand_layouts[0].dims[d]) for s in ran for d in (1, 3)}
    assert kept == {(), ("x",)}


def test_slice_without_strides() -> None:
    ran = check_localized(lambda x: lax.slice(x, (0, 1), (8, 3)), ints(8, 4), meshes=MESHES, primitive="slice")
    assert "[x,.]" in splits(ran)


@pytest.mark.slow
def test_rev() -> None:
    ran = check_localized(lambda x: lax.rev(x, (1,)), ints(8, 4, 4), meshes=X, primitive="rev")
    assert "[x,.,y]" in splits(ran)


def test_split() -> None:
    ran = check_localized(lambda x: lax.split(x, (1, 3), axis=1), ints(8, 4), meshes=X, primitive="split")
    assert "[x+y,.]" in splits(ran)


def test_barrier_splits_operands_of_one_shape_together() -> None:
    ran = check_localized(
        lambda *x: optimization_barrier_p.bind(*x), floats(8, 4), ints(8, 4), floats(4), meshes=X, limit=30
    )
    assert any(str(s.operand_layouts[0]) == str(s.operand_layouts[1]) == "[x,y]" for s in ran)


def test_barrier_of_many_shapes_has_few_factors() -> None:
    shapes = [(8, n) for n in range(1, 40)]
    case = case_of(lambda *x: optimization_barrier_p.bind(*x), *(floats(*s) for s in shapes))
    assert len(case.rule.factors) == 16
    # The largest operands get them.
    assert case.rule.operands[-1] != (None, None)
    assert case.rule.operands[0] == (None, None)


def test_sharding_constraint_is_passed_on() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    ran = check_localized(lambda x: lax.with_sharding_constraint(x, sharding), floats(8, 4), meshes=X)
    assert "[.,x]" in splits(ran)
