"""Reductions, scans along a dim and sorting, in every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lower.harness import MESHES, case_of, check_localized


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*shape: int) -> Any:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(np.int32)


def bools(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape) < 0.8


X = MESHES[1:2]


def kinds(strategies: list[Any]) -> set[str]:
    return {s.result_layouts[0].reduce for s in strategies if s.result_layouts[0].partial}


@pytest.mark.parametrize("make", [floats, ints])
def test_sum(make: Callable[..., Any]) -> None:
    ran = check_localized(lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), make(8, 8), meshes=X)
    assert kinds(ran) == {"sum"}


@pytest.mark.slow
def test_sum_on_every_mesh() -> None:
    check_localized(lambda x: jnp.sum(x, axis=(0, 2)), floats(8, 4, 4), primitive="reduce_sum", limit=20)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("make", [floats, ints])
def test_extremes(name: str, make: Callable[..., Any]) -> None:
    function = getattr(jnp, name)
    ran = check_localized(lambda x: function(x, axis=1), make(4, 8), primitive=f"reduce_{name}", meshes=X)
    assert kinds(ran) == {name}


@pytest.mark.parametrize(("name", "function"), [("and", jnp.all), ("or", jnp.any)])
def test_logical(name: str, function: Callable[..., Any]) -> None:
    value = bools(4, 8) if name == "and" else ~bools(4, 8)
    ran = check_localized(lambda x: function(x, axis=1), value, primitive=f"reduce_{name}", meshes=X)
    assert kinds(ran) == {name}


@pytest.mark.parametrize("name", ["argmax", "argmin", "reduce_prod"])
def test_not_split_along_the_reduced_dim(name: str) -> None:
    function = getattr(jnp, name.removeprefix("reduce_"))
    ran = check_localized(lambda x: function(x, axis=0), floats(4, 8), primitive=name, meshes=X)
    assert kinds(ran) == set()
    assert any(s.split == 8 for s in ran)


def test_xor_and_bitwise_reductions_stay_whole_along_the_reduced_dim() -> None:
    for name in ("and", "or", "xor"):
        bind = getattr(lax, f"reduce_{name}")
        ran = check_localized(lambda x, bind=bind: bind(x, (1,)), ints(8, 8), primitive=f"reduce_{name}", meshes=X)
        assert kinds(ran) == set()


def test_reduce_with_a_function_of_the_user() -> None:
    def argmax(x: Any, i: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            first = a[0] > b[0]
            return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])

        return lax.reduce((x, i), (np.float32(-np.inf), np.int32(0)), larger, (1,))

    index = lax.broadcasted_iota(jnp.int32, (8, 4), 1)
    ran = check_localized(argmax, floats(8, 4), index, primitive="reduce", meshes=X)
    assert any(s.split == 8 for s in ran)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative(name: str, reverse: bool) -> None:
    function = getattr(lax, name)
    meshes = X if name == "cumsum" else MESHES[:1]
    ran = check_localized(
        lambda x: function(x, axis=1, reverse=reverse), floats(8, 4), primitive=name, meshes=meshes, rtol=1e-4
    )
    assert kinds(ran) == ({"sum"} if name == "cumsum" else set())
    assert not any(s.operand_layouts[0].dims[1] for s in ran)


def test_sort_of_several_operands() -> None:
    keys = ints(8, 6, 4)
    ran = check_localized(
        lambda k, v: lax.sort((k, v), dimension=1, num_keys=1, is_stable=True), keys, floats(8, 6, 4), meshes=X
    )
    assert any(s.split == 8 for s in ran)
    assert not any(s.operand_layouts[0].dims[1] for s in ran)


@pytest.mark.slow
def test_complex_extremes_have_no_partial_form() -> None:
    case = case_of(lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), np.ones((4, 8), np.complex64))
    assert [f.reduce for f in case.rule.factors] == [None]
