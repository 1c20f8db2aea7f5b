"""Sliding windows in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pool(name: str) -> Callable[[Any], Any]:
    initial, combine = {
        "sum": (0.0, lax.add),
        "max": (-np.inf, lax.max),
        "min": (np.inf, lax.min),
        "user": (1.0, lambda a, b: a * b + a),
    }[name]
    return lambda x: lax.reduce_window(x, initial, combine, (1, 2, 3, 1), (1, 2, 1, 1), "SAME")


def split_dims(ran: list[Any], operand: int = 0) -> set[int]:
    return {d for s in ran for d, axes in enumerate(s.operand_layouts[operand].dims) if axes}


@pytest.mark.parametrize("name", ["sum", "max", "min", "user"])
def test_pooling(name: str) -> None:
    primitive = "reduce_window" if name == "user" else f"reduce_window_{name}"
    ran = check_localized(pool(name), floats(8, 6, 4, 4), primitive=primitive, meshes=X, limit=6)
    assert split_dims(ran) - {2} == {0, 3}
    assert any(s.operand_layouts[0].partial for s in ran) == (name == "sum")


@pytest.mark.slow
def test_gradient_of_the_largest() -> None:
    ran = check_localized(
        jax.grad(lambda x: (pool("max")(x) * 2).sum()),
        floats(8, 6, 4, 4),
        primitive="select_and_scatter_add",
        meshes=X,
        limit=6,
    )
    assert split_dims(ran) - {2} == {0, 3}
    # Linear in the gradients (operand 0), not in the values among which the largest is looked for.
    assert any(s.operand_layouts[0].partial for s in ran)
    assert not any(s.operand_layouts[1].partial for s in ran)


@pytest.mark.parametrize("padding", ["SAME", ((0, 0), (1, 1), (0, 0), (0, 0))])
@pytest.mark.parametrize("combine", ["max", "min"])
def test_gradient_of_the_largest_under_windows_beyond_the_ends(combine: str, padding: Any) -> None:
    """3 rows with a stride of 2, as in front of residual nets: the split of rows stays, padded or not."""
    initial, largest = (-np.inf, lax.max) if combine == "max" else (np.inf, lax.min)

    def loss(x: Any) -> Any:
        return (lax.reduce_window(x, initial, largest, (1, 3, 1, 1), (1, 2, 1, 1), padding) ** 2).sum()

    ran = check_localized(
        jax.grad(loss), floats(2, 16, 3, 1), primitive="select_and_scatter_add", meshes=MESHES[:1], least=1
    )
    assert split_dims(ran, 1) == {1}


def test_tangent_of_the_largest() -> None:
    ran = check_localized(
        lambda x, t: jax.jvp(pool("max"), (x,), (t,))[1],
        floats(8, 6, 4, 4),
        floats(8, 6, 4, 4, seed=1),
        primitive="select_and_gather_add",
        meshes=X,
        limit=6,
    )
    assert split_dims(ran) == {0, 3}
    assert any(s.operand_layouts[0].partial for s in ran)


@pytest.mark.parametrize(
    "change",
    [
        {"window_dimensions": (2, 1)},
        {"window_strides": (2, 1)},
        {"padding": ((1, 1), (0, 0))},
        {"base_dilation": (2, 1)},
    ],
)
def test_only_a_dim_that_is_not_still_needs_neighbours(change: dict[str, Any]) -> None:
    parameters = {
        "window_dimensions": (1, 1),
        "window_strides": (1, 1),
        "padding": ((0, 0), (0, 0)),
        "base_dilation": (1, 1),
        "window_dilation": (1, 1),
    } | change
    function = lambda x: lax.reduce_window(x, 0.0, lax.add, **parameters)  # noqa: E731
    rule = case_of(function, floats(8, 8)).rule
    assert rule.operands == ((1, 0),)
    assert [f.halo is not None for f in rule.factors] == [False, True]
    check_localized(function, floats(8, 8), meshes=X)


def test_several_operands() -> None:
    def both(x: Any, y: Any) -> Any:
        return lax.reduce_window(
            (x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0] * b[1], a[1] + b[1]), (1, 2), (1, 2), "VALID"
        )

    ran = check_localized(both, floats(8, 4), floats(8, 4, seed=1), primitive="reduce_window", meshes=X)
    assert split_dims(ran, 1) == {0}
