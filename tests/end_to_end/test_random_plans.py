"""Any plan that the problem allows gives the values of the plain function."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.compare import assert_same
from tests.end_to_end.functions import CASES
from tests.end_to_end.random_plans import random_plan
from tests.versions import tolerance


@pytest.mark.few(7)
@pytest.mark.parametrize("name", CASES)
def test_the_best_plan(name):
    fn, args = CASES[name]
    # Where a product gives bfloat16, so do its terms on several devices: they and the whole are rounded to 2**-9.
    assert_same(fn, args, cluster=MIDDLE, rtol=tolerance(1e-2, 2**-8) if name == "mixed precision" else 2e-5)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_random_plans(name, seed):
    fn, args = CASES[name]
    assert_same(fn, args, cluster=MIDDLE, search=random_plan(seed), rtol=1e-2 if name == "mixed precision" else 1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200)
@given(st.sampled_from(sorted(CASES)), st.integers(3, 10**6), st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]))
def test_many_random_plans(name, seed, mesh_shape):
    fn, args = CASES[name]
    rtol = 1e-2 if name == "mixed precision" else 1e-4
    assert_same(fn, args, cluster=MIDDLE, search=random_plan(seed), mesh_shape=mesh_shape, rtol=rtol)
