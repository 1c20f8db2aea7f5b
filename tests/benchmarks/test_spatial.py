"""Drawn convolution nets: the same for the same seed, and planned with no more bytes than the best split by hand."""

from __future__ import annotations

import jax
import pytest

from benchmarks.family_bytes import planned
from benchmarks.spatial import FAMILIES, SPLITS, by_hand, drawn


@pytest.mark.slow
def test_a_seed_draws_the_same_nets() -> None:
    cases = drawn(3, 20)
    assert cases == drawn(3, 20) and cases[:5] == drawn(3, 5) and cases != drawn(4, 20)
    assert {c.family for c in cases} == set(FAMILIES) and {c.batch for c in cases} == {1, 2, 4, 8}
    step, args = next(c for c in cases if c.family == "pooled").build()
    state, loss = jax.eval_shape(step, *args)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(args[0])]
    assert loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_plans_send_no_more_than_the_best_split_by_hand(seed: int) -> None:
    (case,) = drawn(seed, 1)
    sent = [n for split in SPLITS if (n := by_hand(case.build(), split)) is not None]
    assert planned(case.build()) <= min(sent)
