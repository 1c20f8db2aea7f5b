from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.few import settings, spread

PRODUCT = settings([f"{i}-{j}" for i, j in itertools.product(range(3), range(4))])


def values(tests, taken) -> set:
    return {setting for k in taken for setting in tests[k] if " " not in setting[0]}


@given(st.integers(0, 14))
def test_so_many_are_taken_and_each_adds_what_it_can(count) -> None:
    taken = spread(PRODUCT, count)
    assert len(taken) == min(count, len(PRODUCT)) == len(set(taken))
    if count >= 4:  # as many as the longer factor has values
        assert values(PRODUCT, taken) == values(PRODUCT, range(len(PRODUCT)))


def test_of_one_factor_the_first_are_taken() -> None:
    assert spread(settings(["one", "two-three", "four"]), 2) == (0, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
def test_of_a_function_with_the_mark_the_others_are_slow(request, a, b) -> None:
    family = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert (request.node.get_closest_marker("slow") is None) == (a == b)
    assert request.node in family
