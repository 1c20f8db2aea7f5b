"""Matrix products in every strategy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*shape: int, dtype: Any = np.int32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


@pytest.mark.slow
def test_batched_product_on_every_mesh() -> None:
    ran = check_localized(
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))), floats(8, 8, 8), floats(8, 8, 8), limit=24
    )
    assert {s.result_layouts[0].reduce for s in ran} == {"sum"}
    assert any(s.split == 8 and s.result_layouts[0].partial for s in ran)


@st.composite
def products(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Operands with batch, contracted and free dims in any order, and their dimension numbers."""
    sizes = st.sampled_from((2, 3, 4, 8))
    batch, contract = (draw(st.lists(sizes, max_size=2)) for _ in range(2))
    sides = []
    for _ in range(2):
        named = [("b", i, n) for i, n in enumerate(batch)] + [("c", i, n) for i, n in enumerate(contract)]
        named += [("f", i, n) for i, n in enumerate(draw(st.lists(sizes, max_size=2)))]
        sides.append(draw(st.permutations(named)))

    def dims(kind: str, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(next(d for d, (k, j, _) in enumerate(side) if (k, j) == (kind, i)) for i in range(count))
            for side in sides
        )

    left, right = (floats(*(n for _, _, n in side), seed=i) for i, side in enumerate(sides))
    return left, right, (dims("c", len(contract)), dims("b", len(batch)))


@pytest.mark.slow
@settings(max_examples=6)
@given(products())
def test_any_dimension_numbers(product: tuple[Any, Any, Any]) -> None:
    left, right, numbers = product
    check_localized(lambda a, b: lax.dot_general(a, b, numbers), left, right, meshes=X, limit=10, least=1)


def test_narrow_integers_that_widen_are_not_linear() -> None:
    def product(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)

    narrow, wide = ints(4, 8, dtype=np.int8), ints(8, 4)
    assert case_of(product, narrow, narrow.T).rule.linear == ()
    assert case_of(product, wide, wide.T).rule.linear == ((0,), (1,))
    check_localized(product, narrow, narrow.T, meshes=X, limit=12)
    check_localized(product, ints(4, 8), wide, meshes=X, limit=12)


def test_bools_are_not_contracted_in_pieces() -> None:
    some = floats(4, 8) > 0
    rule = case_of(lambda a, b: lax.dot(a, b), some, some.T).rule
    assert [f.reduce for f in rule.factors] == [None, None]
    assert rule.linear == ()
    check_localized(lambda a, b: lax.dot(a, b), some, some.T, meshes=X)


RAGGED = (
    # (left, right, contracted, ragged dim, group dims): ragged rows, their two gradients, ragged batch.
    ((8, 4), (2, 4, 8), ((1,), (1,)), ((), ()), 0, (0,)),
    ((8, 4), (8, 8), ((0,), (0,)), ((), ()), 0, ()),
    ((8, 8), (2, 4, 8), ((1,), (2,)), ((), ()), 0, (0,)),
    ((4, 8, 4), (2, 4, 4, 8), ((2,), (2,)), ((0,), (1,)), 1, (0,)),
    ((4, 8, 4), (4, 8, 2), ((1,), (1,)), ((0,), (0,)), 1, ()),
    ((8, 4, 4), (8, 4, 2), ((2,), (1,)), ((0,), (0,)), 0, ()),
)


@pytest.mark.few(6)
@pytest.mark.parametrize("sizes", [(3, 5), (0, 6)])
@pytest.mark.parametrize("shapes", RAGGED)
def test_ragged(shapes: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    """Groups that end in the middle of a piece of the rows, that are empty, and rows that are in none."""
    left, right, contract, batch, ragged, group = shapes
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), (ragged,), group)
    ran = check_localized(
        lambda a, b, n: lax.ragged_dot_general(a, b, n, numbers),
        floats(*left),
        floats(*right, seed=1),
        np.asarray(sizes, np.int32),
        primitive="ragged_dot_general",
        meshes=X,
        limit=64,
    )
    assert any(s.split > 1 for s in ran)
    if ragged in batch[0]:
        assert all(not s.operand_layouts[0].dims[ragged] for s in ran)
        return
    assert any(s.operand_layouts[0].dims[ragged] for s in ran)
    if group:
        assert any(s.operand_layouts[1].dims[group[0]] and s.result_layouts[0].partial for s in ran)
        assert any(s.operand_layouts[1].dims[group[0]] and s.operand_layouts[0].dims[ragged] for s in ran)
    else:
        assert any(s.result_layouts[0].dims[0] for s in ran)
