"""Drawn planning problems: the same for a seed, of every kind, and every family of models is a step that traces."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import drawn
from benchmarks.families import FAMILIES


def test_a_case_depends_on_its_seed_and_number_alone():
    assert drawn.draw(3, 5) == drawn.draw(3, 5)
    assert drawn.draw(3, 5) != drawn.draw(4, 5)


def test_a_hundred_cases_are_of_every_kind():
    cases = [drawn.draw(0, number) for number in range(100)]
    assert {case.family for case in cases} >= {"gpt", "llama", "mlp", "moe", "wide_resnet", *FAMILIES}
    assert {bool(case.asked) for case in cases} == {True, False}
    assert {"memory_limit" in case.options for case in cases} == {True, False}
    assert min(case.nodes for case in cases) == 1 and max(case.nodes for case in cases) == 512


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_is_a_train_step(family):
    step, (state, batch) = FAMILIES[family](8)
    (params, moments), loss = jax.eval_shape(step, state, batch)
    assert loss.shape == () and loss.dtype == np.float32
    assert jax.tree.map(lambda a: (a.shape, a.dtype), (params, moments)) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )


def test_the_report_says_what_was_missed():
    rows = [{"case": "a", "near_s": 1.0, "wall_s": 9.0, "cpu_s": 9.0, "bound_holds": True, "times_the_best_asked": 1.0}]
    assert drawn.summary(rows, 0).passed
    for worse in ({"near_s": 30.0}, {"bound_holds": False}, {"times_the_best_asked": 1.02}):
        assert not drawn.summary([{**rows[0], **worse}], 0).passed
