"""The collector of garbage while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

import autopar
from autopar.search.garbage import THRESHOLDS, rare_collections
from tests.search.problems import f32, toy


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_put_back() -> None:
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
        with rare_collections():
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ZeroDivisionError), rare_collections():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10**6, 5, 5)])
def test_who_collects_as_rarely_is_left_alone(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


@pytest.mark.slow
def test_planning_collects_rarely_and_says_so_to_nobody_after() -> None:
    seen: list[tuple[int, ...]] = []
    step = autopar.parallelize(
        lambda x: jnp.tanh(x), cluster=toy(2), progress=lambda text: seen.append(gc.get_threshold())
    )
    step.plan(f32(8, 8))
    assert THRESHOLDS in seen
    assert gc.get_threshold() == (700, 10, 10)
