"""``gather`` and slices at computed positions, in every strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]
MODES = ("clip", "fill", "promise_in_bounds")


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positions(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Any:
    return np.random.default_rng(5).integers(low, high, shape).astype(dtype)


def take(table: Any, indices: Any, mode: str, **more: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, indices, numbers, (1, table.shape[1]), mode=mode, **more)


def picks(ran: list[Any]) -> bool:
    """Whether some strategy splits the vocabulary."""
    return any(s.operand_layouts[0].dims[0] and s.result_layouts[0].partial for s in ran)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint8])
def test_embedding_with_indices_out_of_bounds(mode: str, kind: Any) -> None:
    table = (floats(16, 4) * 20).astype(kind)
    ran = check_localized(lambda t, i: take(t, i, mode), table, positions(-30, 40, 8, 1), meshes=X, limit=16)
    assert picks(ran)


@pytest.mark.slow
def test_embedding_on_every_mesh() -> None:
    ran = check_localized(lambda t, i: t[i], floats(32, 8), positions(0, 32, 8, 4), primitive="gather", limit=8)
    assert picks(ran)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int16])
@pytest.mark.parametrize("mode", MODES)
def test_index_types(dtype: Any, mode: str) -> None:
    """An index of 8 bits into more rows than it can count, and unsigned ones beyond all rows."""
    info = np.iinfo(dtype)
    indices = np.asarray([info.min, info.min + 1, 0, 7, 100, 127, info.max - 1, info.max], dtype)[:, None]
    check_localized(lambda t, i: take(t, i, mode), floats(320, 2), indices, meshes=X[:1], limit=6)


@pytest.mark.slow
def test_wide_indices(x64: None) -> None:
    indices = np.asarray([-(2**40), 2**40, 3, -1, 2**32 + 1, 9, 15, 0])[:, None]
    for mode in MODES:
        check_localized(lambda t, i, mode=mode: take(t, i, mode), floats(16, 2), indices, meshes=X, limit=6)


@pytest.mark.parametrize("fill", [0.0, 3.5, np.nan])
def test_fill_is_contributed_once(fill: float) -> None:
    def case(table: Any, indices: Any) -> Any:
        return take(table, indices, "fill", fill_value=fill)

    check_localized(case, floats(16, 4), positions(-9, 24, 8, 1), meshes=X, limit=12)
    assert case_of(case, floats(16, 4), positions(0, 9, 8, 1)).rule.linear == (((0,),) if fill == 0.0 else ())


def test_rows_that_are_not_finite_stay_in_their_place() -> None:
    table = floats(16, 4)
    table[3] = np.inf
    table[9] = np.nan
    check_localized(lambda t, i: take(t, i, "clip"), table, positions(0, 16, 8, 1), meshes=X)


@pytest.mark.slow
def test_bools_and_keys_have_no_vocabulary_factor() -> None:
    for table in (floats(16, 4) > 0, jax.random.split(jax.random.key(0), (16, 4))):
        case = case_of(lambda t, i: t[i], table, positions(0, 16, 8), primitive="gather")
        assert all(f.reduce is None for f in case.rule.factors)
        assert case.rule.linear == ()
        check_localized(lambda t, i: t[i], table, positions(0, 16, 8), primitive="gather", meshes=X, limit=8)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_two_indexed_dims(mode: str) -> None:
    numbers = lax.GatherDimensionNumbers((0,), (1, 2), (2, 1))
    ran = check_localized(
        lambda t, i: lax.gather(t, i, numbers, (3, 1, 1), mode=mode),
        floats(3, 8, 8),
        positions(-4, 12, 5, 2),
        meshes=X,
    )
    assert any(s.operand_layouts[0].dims[1] and s.operand_layouts[0].dims[2] for s in ran)


@pytest.mark.parametrize("function", [jnp.take_along_axis, jax.vmap(lambda x, i: x[i])])
def test_batching_dims(function: Any) -> None:
    indices = positions(0, 8, 8, 4, 4) if function is jnp.take_along_axis else positions(0, 8, 8, 4)
    more = {"axis": 1} if function is jnp.take_along_axis else {}
    check_localized(
        lambda x, i: function(x, i, **more), floats(8, 8, 4), indices, primitive="gather", meshes=X, limit=8
    )


@st.composite
def gathers(draw: st.DrawFn) -> tuple[Any, Any, lax.GatherDimensionNumbers, tuple[int, ...]]:
    """Operand dims are batching, picked and dropped, picked and kept, windows, or whole."""
    size = st.sampled_from((2, 4, 8))
    names = ("batch", "pick", "keep", "window", "whole")
    kinds = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    shape = [draw(size) for _ in kinds]
    at = {k: tuple(d for d, kind in enumerate(kinds) if kind == k) for k in names}
    sizes = tuple(
        n if kind == "whole" else n // 2 if kind == "window" else 1 for n, kind in zip(shape, kinds, strict=True)
    )
    indexed = [d for d, kind in enumerate(kinds) if kind in ("pick", "keep", "window") or draw(st.booleans())]
    indexed = draw(st.permutations([d for d in indexed if kinds[d] != "batch"]))
    rows: list[int | None] = draw(st.permutations([*at["batch"], *([None] * draw(st.integers(0, 2)))]))
    index_shape = [draw(size) if d is None else shape[d] for d in rows]
    windows = len(kinds) - len(at["batch"]) - len(at["pick"])
    rank = windows + len(rows)
    offset = tuple(sorted(draw(st.permutations(range(rank)))[:windows]))
    numbers = lax.GatherDimensionNumbers(
        offset, at["pick"], tuple(indexed), at["batch"], tuple(rows.index(d) for d in at["batch"])
    )
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    indices = rng.integers(-3, 11, (*index_shape, len(indexed))).astype(np.int32)
    return floats(*shape), indices, numbers, sizes


@pytest.mark.slow
@settings(max_examples=8)
@given(gathers(), st.sampled_from(MODES))
def test_any_gather(case: Any, mode: str) -> None:
    operand, indices, numbers, sizes = case
    check_localized(
        lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode), operand, indices, meshes=X, limit=6, least=1
    )


@pytest.mark.parametrize("start", [-2, 1, 7])
def test_dynamic_slice(start: int) -> None:
    ran = check_localized(
        lambda x, i: lax.dynamic_slice(x, (i, 0, i), (2, 8, 4)),
        floats(8, 8, 4),
        np.int32(start),
        meshes=X,
        primitive="dynamic_slice",
    )
    assert {d for s in ran for d in range(3) if s.operand_layouts[0].dims[d]} == {1, 2}


@pytest.mark.parametrize("start", [-2, 1, 7])
def test_dynamic_update_slice(start: int) -> None:
    ran = check_localized(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0, 0)),
        floats(8, 8, 4),
        floats(2, 8, 4, seed=1),
        np.int32(start),
        meshes=X,
        primitive="dynamic_update_slice",
    )
    assert {d for s in ran for d in range(3) if s.operand_layouts[0].dims[d]} == {1, 2}
    assert any(s.operand_layouts[0].partial and s.operand_layouts[1].partial for s in ran)


def test_top_k() -> None:
    ran = check_localized(lambda x: lax.top_k(x, 3), floats(8, 8, 6), meshes=X)
    assert any(s.split == 8 for s in ran)
    ran = check_localized(lambda x: lax.approx_max_k(x, 3, reduction_dimension=-2), floats(8, 8, 4), meshes=X)
    assert {d for s in ran for d in range(3) if s.operand_layouts[0].dims[d]} == {0, 2}
