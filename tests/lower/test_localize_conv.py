"""Convolutions in every strategy, and those that their gradients are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.lower.harness import MESHES, check_localized

X = MESHES[1:2]
IMAGES = ("NHWC", "HWIO", "NHWC")


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def split_dims(ran: list[Any], operand: int) -> set[int]:
    return {d for s in ran for d, axes in enumerate(s.operand_layouts[operand].dims) if axes}


def test_plain_on_every_mesh() -> None:
    ran = check_localized(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=IMAGES),
        floats(8, 6, 6, 8),
        floats(3, 3, 8, 8, seed=1),
        limit=6,
    )
    assert split_dims(ran, 0) - {1} == {0, 3}
    assert split_dims(ran, 1) == {2, 3}


def convolution(groups: int) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=IMAGES, feature_group_count=groups
    )


# name: input shape, kernel shape, groups
CONVOLUTIONS = {
    "plain": ((8, 5, 5, 4), (3, 3, 4, 8), 1),
    "grouped": ((4, 5, 5, 16), (3, 3, 2, 24), 8),
    "depthwise": ((4, 5, 5, 8), (3, 3, 1, 8), 8),
    "depthwise, several outputs": ((4, 5, 5, 8), (3, 3, 1, 16), 8),
    "groups fewer than devices": ((8, 5, 5, 16), (3, 3, 8, 16), 2),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
@pytest.mark.parametrize("part", ["itself", "input gradient", "kernel gradient"])
@pytest.mark.parametrize("examples", [False, True])
def test_gradients(name: str, part: str, examples: bool) -> None:
    """With ``examples`` the convolution of `jax.vmap`: kernel gradients of each example, kernels of their own."""
    shape, kernel_shape, groups = CONVOLUTIONS[name]
    conv = convolution(groups)
    x, w = floats(*shape), floats(*kernel_shape, seed=1)
    out = floats(*conv(x, w).shape, seed=2)

    def itself(x: Any, w: Any, g: Any) -> Any:
        return conv(x, w)

    def of_input(x: Any, w: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda v: conv(v, w), x)(g)[0]

    def of_kernel(x: Any, w: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda v: conv(x, v), w)(g)[0]

    function = {"itself": itself, "input gradient": of_input, "kernel gradient": of_kernel}[part]
    if examples:
        x, g = x[:, None], out[:, None]
        if part == "kernel gradient":
            function = jax.vmap(function, (0, None, 0))
        else:
            w = floats(shape[0], *kernel_shape, seed=1)
            function = jax.vmap(function)
    else:
        g = out
    ran = check_localized(function, x, w, g, primitive="conv_general_dilated", meshes=X, limit=3, rtol=1e-4)
    assert any(s.split > 1 for s in ran)


def test_groups_are_split_with_their_features() -> None:
    shape, kernel_shape, groups = CONVOLUTIONS["grouped"]
    ran = check_localized(convolution(groups), floats(*shape), floats(*kernel_shape), meshes=MESHES, limit=12)
    assert split_dims(ran, 0) == {0, 3}
    assert split_dims(ran, 1) == {3}
    assert any(s.operand_layouts[0].dims[3] == ("x",) and s.split == 8 for s in ran)


def test_groups_that_do_not_divide_are_whole() -> None:
    """24 features in 3 groups: eight even pieces would cut through groups."""
    ran = check_localized(convolution(3), floats(4, 3, 3, 24), floats(3, 3, 8, 24), meshes=X, rtol=1e-4)
    assert split_dims(ran, 0) == {0}
    assert split_dims(ran, 1) == set()


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    """Any number of spatial dims, order of dims, strides, dilations, paddings and groups."""
    spatial = draw(st.integers(0, 2))
    kind = draw(st.sampled_from(("plain", "features", "batch")))
    groups = 1 if kind == "plain" else draw(st.sampled_from((2, 3, 4, 8)))
    small = st.integers(1, 4)
    batch, inputs, outputs = draw(small) * 2, draw(small), draw(small) * 2
    window = [draw(st.integers(1, 3)) for _ in range(spatial)]
    space = [draw(st.integers(3, 5)) for _ in range(spatial)]
    left = [batch * (groups if kind == "batch" else 1), inputs * (groups if kind == "features" else 1), *space]
    right = [outputs * groups, inputs, *window]
    orders = [tuple(draw(st.permutations(range(2 + spatial)))) for _ in range(3)]

    def placed(shape: list[int], order: tuple[int, ...]) -> Any:
        return floats(*(shape[order.index(d)] for d in range(len(shape))), seed=len(shape))

    several = lambda values: tuple(draw(values) for _ in range(spatial))  # noqa: E731
    parameters = {
        "window_strides": several(st.integers(1, 2)),
        "padding": several(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        "lhs_dilation": several(st.integers(1, 2)),
        "rhs_dilation": several(st.integers(1, 2)),
        "dimension_numbers": lax.ConvDimensionNumbers(*orders),
        "feature_group_count": groups if kind == "features" else 1,
        "batch_group_count": groups if kind == "batch" else 1,
    }
    return placed(left, orders[0]), placed(right, orders[1]), parameters


@pytest.mark.slow
@settings(max_examples=8)
@given(convolutions())
def test_any_convolution(case: tuple[Any, Any, dict[str, Any]]) -> None:
    left, right, parameters = case
    check_localized(
        lambda x, w: lax.conv_general_dilated(x, w, **parameters), left, right, meshes=X, limit=6, least=1, rtol=1e-4
    )
