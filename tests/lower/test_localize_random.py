"""A device's piece of a draw has the bits of the whole draw."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.lower.localize.random import counters, wide_product
from tests.lower.harness import MESHES, case_of, check_localized

X = MESHES[1:2]


def key(impl: str = "threefry2x32") -> Any:
    return jax.random.key(7, impl=impl)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits(width: int) -> None:
    ran = check_localized(
        lambda k: jax.random.bits(k, (8, 3, 4), f"uint{width}"),
        key(),
        primitive="random_bits",
        meshes=X,
        limit=6 if width == 32 else 2,
    )
    assert any(s.split > 1 for s in ran)


def test_bits_of_64() -> None:
    with jax.enable_x64(True):
        check_localized(
            lambda k: jax.random.bits(k, (8, 4), "uint64"), key(), primitive="random_bits", meshes=X, limit=3
        )


@pytest.mark.parametrize("shape", [(8,), (4, 3, 2)])
def test_bits_of_several_keys(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(key(), (2, 3))
    ran = check_localized(
        lambda k: jax.vmap(jax.vmap(lambda k: jax.random.bits(k, shape)))(k),
        keys,
        primitive="random_bits",
        meshes=X,
        limit=2,
    )
    assert any(s.split > 1 for s in ran)
    assert all(s.operand_layouts[0].is_replicated for s in ran)


def test_bits_that_depend_on_the_size_of_the_draw() -> None:
    with jax.threefry_partitionable(False):
        ran = check_localized(lambda k: jax.random.bits(k, (8, 4)), key(), primitive="random_bits", meshes=X)
    assert any(s.split == 8 for s in ran)


def test_streams_are_drawn_whole() -> None:
    assert not case_of(lambda k: jax.random.bits(k, (8, 4)), key("rbg"), primitive="random_bits").rule.factors


def test_keys_are_made_whole() -> None:
    for name, function in (
        ("random_fold_in", lambda k: jax.random.fold_in(k, 3)),
        ("random_split", lambda k: jax.random.split(k, 8)),
        ("random_unwrap", jax.random.key_data),
    ):
        assert not case_of(function, key(), primitive=name).rule.factors


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), st.integers(0, 2**64 - 1))
def test_wide_product(values: list[int], factor: int) -> None:
    high, low = wide_product(jnp.asarray(values, jnp.uint32), factor)
    got = [(int(h) << 32) | int(w) for h, w in zip(np.asarray(high), np.asarray(low), strict=True)]
    assert got == [v * factor % 2**64 for v in values]


@settings(max_examples=12)
@given(st.data())
def test_counters_of_pieces_of_huge_draws(data: st.DataObject) -> None:
    """Numbers above 2**32, of shapes that no test could draw."""
    shape = [data.draw(st.integers(1, 2**n)) for n in (20, 21, 20)]
    local = [min(n, 2) for n in shape]
    starts = [data.draw(st.integers(0, n - m)) for n, m in zip(shape, local, strict=True)]
    high, low = counters(shape, local, [jnp.asarray(s, jnp.int32) for s in starts])
    for index in np.ndindex(*local):
        number = sum((s + i) * math.prod(shape[d + 1 :]) for d, (s, i) in enumerate(zip(starts, index, strict=True)))
        assert (int(high[index]) << 32) | int(low[index]) == number
