"""The ``scatter`` family in every strategy."""

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
MODES = ("clip", "drop", "promise_in_bounds")
NAMES = ("add", "sub", "mul", "min", "max")
ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positions(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Any:
    return np.random.default_rng(5).integers(low, high, shape).astype(dtype)


def function(name: str) -> Any:
    return lax.scatter if name == "set" else getattr(lax, f"scatter_{name}")


def rule(name: str, *operands: Any, **more: Any) -> Any:
    return case_of(lambda x, i, u: function(name)(x, i, u, ROWS, **more), *operands).rule


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
def test_embedding_gradient_with_indices_out_of_bounds(mode: str) -> None:
    ran = check_localized(
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS, mode=mode),
        floats(16, 4),
        positions(-20, 40, 8, 1),
        floats(8, 4, seed=1),
        meshes=X,
    )
    assert any(s.operand_layouts[0].dims[0] and s.operand_layouts[2].dims[0] for s in ran), "rows and updates"
    assert any(s.operand_layouts[0].partial and not s.operand_layouts[2].partial for s in ran), "updates alone"
    assert any(s.operand_layouts[0].partial and s.operand_layouts[2].partial for s in ran), "terms"


@pytest.mark.slow
def test_embedding_gradient_on_every_mesh() -> None:
    check_localized(
        lambda x, i, u: x.at[i].add(u), floats(16, 8), positions(0, 16, 8), floats(8, 8), primitive="scatter-add",
        limit=6,
    )  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_combining(name: str, kind: Any) -> None:
    operands = (floats(16, 4) * 9).astype(kind), positions(-3, 20, 8, 1), (floats(8, 4, seed=1) * 9).astype(kind)
    check_localized(lambda x, i, u: function(name)(x, i, u, ROWS), *operands, meshes=X, limit=8)
    reduced = [f for f in rule(name, *operands).factors if f.reduce]
    assert [f.partial_operands for f in reduced] == ([(0,)] if name in ("add", "sub") else [])
    assert rule(name, *operands).linear == {"add": ((0, 2),), "sub": ((0, 2),), "mul": ((0,),)}.get(name, ())


@pytest.mark.parametrize("mode", MODES)
def test_overwriting_with_different_indices(mode: str) -> None:
    indices = np.random.default_rng(0).permutation(32)[:8, None].astype(np.int32) - 8
    if mode == "clip":
        indices = np.clip(indices, 0, 15)
        indices = np.unique(indices)[:4, None]
    operands = floats(16, 4), indices, floats(len(indices), 4, seed=1)
    ran = check_localized(
        lambda x, i, u: lax.scatter(x, i, u, ROWS, mode=mode, unique_indices=True), *operands, meshes=X
    )
    assert any(s.operand_layouts[2].partial for s in ran)
    assert rule("set", *operands).linear == ()


def test_one_update_is_linear() -> None:
    operands = floats(16, 4), np.asarray([[3]], np.int32), floats(1, 4)
    assert rule("set", *operands).linear == ((0, 2),)
    check_localized(lambda x, i, u: lax.scatter(x, i, u, ROWS), *operands, meshes=X)


def test_bools_and_functions_of_the_user() -> None:
    some = floats(16, 4) > 0
    operands = some, positions(-3, 20, 8, 1), np.ones((8, 4), bool)
    ran = check_localized(lambda x, i, u: lax.scatter(x, i, u, ROWS), *operands, meshes=X)
    assert not any(layout.partial for s in ran for layout in s.operand_layouts)
    ran = check_localized(
        lambda x, i: x.at[i].apply(jnp.sin), floats(16, 4), np.arange(3, 11), primitive="scatter", meshes=X
    )
    assert any(s.split == 8 for s in ran)
    assert not any(layout.partial for s in ran for layout in s.operand_layouts)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
@pytest.mark.parametrize("mode", MODES)
def test_index_types(dtype: Any, mode: str) -> None:
    info = np.iinfo(dtype)
    indices = np.asarray([info.min, info.min + 1, 0, 7, 100, 119, 120, 127], dtype)[:, None]
    check_localized(
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS, mode=mode),
        floats(120, 2),
        indices,
        floats(8, 2),
        meshes=X[:1],
        limit=5,
    )


def test_wide_indices(x64: None) -> None:
    indices = np.asarray([-(2**40), 2**40, 3, -1, 2**32 + 1, 9, 15, 0])[:, None]
    for mode in MODES:
        check_localized(
            lambda x, i, u, mode=mode: lax.scatter_add(x, i, u, ROWS, mode=mode),
            floats(16, 2),
            indices,
            floats(8, 2),
            meshes=X,
            limit=5,
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gather rows", "take_along_axis", "vmap", "vmap shared table"])
def test_gradients_of_reads(name: str) -> None:
    reads = {
        "gather rows": (lambda x, i: x[i], floats(16, 4), positions(0, 16, 8, 2)),
        "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), floats(4, 8, 4), positions(0, 8, 4, 4, 4)),
        "vmap": (jax.vmap(lambda x, i: x[i]), floats(8, 8, 4), positions(0, 8, 8, 4)),
        "vmap shared table": (jax.vmap(lambda x, i: x[i], (None, 0)), floats(8, 4), positions(0, 8, 8, 4)),
    }
    read, table, indices = reads[name]
    table = jnp.asarray(table)
    weights = floats(*read(table, indices).shape, seed=3)
    ran = check_localized(
        jax.grad(lambda x, i: (read(x, i) * weights).sum()),
        table,
        indices,
        primitive="scatter-add",
        meshes=X,
        limit=5,
    )
    assert any(s.split > 1 for s in ran)


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Any, Any, Any, lax.ScatterDimensionNumbers]:
    """Operand dims are batching, picked and inserted, picked and kept, windows, or whole."""
    size = st.sampled_from((2, 4, 8))
    names = ("batch", "pick", "keep", "window", "whole")
    kinds = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    shape = [draw(size) for _ in kinds]
    at = {k: tuple(d for d, kind in enumerate(kinds) if kind == k) for k in names}
    sizes = [n if kind == "whole" else n // 2 if kind == "window" else 1 for n, kind in zip(shape, kinds, strict=True)]
    indexed = [d for d, kind in enumerate(kinds) if kind in ("pick", "keep", "window") or draw(st.booleans())]
    indexed = draw(st.permutations([d for d in indexed if kinds[d] != "batch"]))
    rows: list[int | None] = draw(st.permutations([*at["batch"], *([None] * draw(st.integers(0, 2)))]))
    row_sizes = [draw(size) if d is None else shape[d] for d in rows]
    windows = [sizes[d] for d in range(len(kinds)) if kinds[d] not in ("batch", "pick")]
    rank = len(windows) + len(rows)
    placed = tuple(sorted(draw(st.permutations(range(rank)))[: len(windows)]))
    left, right = iter(windows), iter(row_sizes)
    update_shape = [next(left) if d in placed else next(right) for d in range(rank)]
    numbers = lax.ScatterDimensionNumbers(
        placed, at["pick"], tuple(indexed), at["batch"], tuple(rows.index(d) for d in at["batch"])
    )
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    indices = rng.integers(-3, 11, (*row_sizes, len(indexed))).astype(np.int32)
    return floats(*shape), indices, floats(*update_shape, seed=1), numbers


@settings(max_examples=7)
@given(scatters(), st.sampled_from(MODES), st.sampled_from(NAMES))
def test_any_scatter(case: Any, mode: str, name: str) -> None:
    operand, indices, updates, numbers = case
    check_localized(
        lambda x, i, u: function(name)(x, i, u, numbers, mode=mode),
        operand,
        indices,
        updates,
        meshes=X,
        limit=6,
        least=1,
    )
