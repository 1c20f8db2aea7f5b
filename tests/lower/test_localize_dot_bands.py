"""Products with fixed matrices whose nonzeros lie in a band: the dim that they map is split."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.frontend.fixed_tables import windows_of
from tests.lower.harness import MESHES, check_localized


@st.composite
def banded(draw: st.DrawFn) -> tuple[Any, tuple[int, ...]]:
    """A matrix [size, count] with random numbers near its diagonal, some of its columns empty, and its windows."""
    unit, to, of = draw(st.sampled_from((8, 16, 24))), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size, count = unit * of, unit * to
    below, above = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    at = np.arange(size)[:, None] - np.arange(count)[None, :] * of / to
    matrix = rng.standard_normal((size, count)) * ((at >= -below) & (at <= above)) * (rng.random(count) > 0.1)
    windows = windows_of(matrix)
    return matrix, windows or ()


@settings(max_examples=25, deadline=None)
@given(banded(), st.sampled_from((0, 1)), st.booleans())
def test_pieces_are_those_of_the_whole(case: tuple[Any, tuple[int, ...]], side: int, flipped: bool) -> None:
    """For either order of operands, and of dims of the matrix."""
    matrix, windows = case
    if not windows:
        return
    with jax.enable_x64(True):
        x = np.random.default_rng(1).standard_normal((2, matrix.shape[0], 3))
        w, row = (matrix.T, 1) if flipped else (matrix, 0)
        dims = ((1,), (row,)) if side == 0 else ((row,), (1,))
        operands = (x, w) if side == 0 else (w, x)
        ran = check_localized(
            lambda a, b: lax.dot_general(a, b, (dims, ((), ()))),
            *operands,
            meshes=MESHES[:1],
            rtol=1e-12,
            attrs={"band": (side, *windows)},
            least=1,
        )
    split = [s for s in ran if s.operand_layouts[side].dims[1]]
    shards, own = 8, matrix.shape[0] // 8
    needs = max(windows[3:5]) // windows[5] + 1
    assert split or needs > own, f"{windows} over {shards} devices"


def test_windows_cover_the_nonzeros() -> None:
    """Linear interpolation by two: columns 2 i and 2 i + 1 have the rows around i; as positions of halves."""
    matrix = np.zeros((16, 32))
    for i in range(16):
        matrix[i, 2 * i : 2 * i + 2] = 0.75
        matrix[max(0, i - 1), 2 * i], matrix[min(15, i + 1), 2 * i + 1] = 0.25, 0.25
    assert windows_of(matrix) == (16, 32, 1, 4, 2, 2)
    assert windows_of(matrix.T) == (32, 16, 2, 4, 1, 1)
    assert windows_of(np.ones((16, 32))) is None
    assert windows_of(np.zeros((16, 32))) is None
