"""Functions of jax in higher-order forms, in six ways: a few drawn ones by default, all primitives in the slow test."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.forms.cells import cells, kept
from tests.forms.forms import FORMS, step_of
from tests.forms.functions import candidates, found
from tests.forms.ways import WAYS, outcome

_CHEAP = ("whole", "microbatches", "padded", "recomputed")


def drawn(seed, count, ways):
    """(function, form, way), always the same: forms and ways take turns, functions are drawn."""
    rng = np.random.default_rng(seed)
    functions, forms = candidates(), list(FORMS)
    order = iter(rng.permutation(len(functions)))
    for n in range(count):
        here = None
        while here is None:
            here = found(*functions[next(order)])
        yield here, forms[(seed + n) % len(forms)], ways[n % len(ways)]


@pytest.mark.parametrize("seed", range(2))
def test_drawn_functions_rewritten(x64, seed):
    for function, form, way in drawn(2 * seed, 2, _CHEAP[2 * seed :]):
        said = outcome(step_of(function, form), way)
        assert said.startswith(("ok", "refused", "invalid")), (function.name, form, way, said)


@pytest.mark.parametrize("form", ["helper with a constant", pytest.param("reference", marks=pytest.mark.slow)])
def test_forms_are_split_and_staged(x64, form):
    (function,) = (found(*c) for c in candidates() if c[0] == "jax.numpy.tanh")
    assert [outcome(step_of(function, form), way) for way in ("split", "stages")] == ["ok", "ok"]


def test_cells_are_all_pairs_of_forms_and_ways_in_a_drawn_order():
    (function,) = (found(*c) for c in candidates() if c[0] == "jax.numpy.tanh")
    some = cells([function] * 6)
    assert len({c.name for c in some}) == len(FORMS) * len(WAYS) == len(some)
    assert [c.name for c in some] == [c.name for c in cells([function] * 6)]
    assert [c.form for c in some[:14]] != list(FORMS)


def test_kept_outcomes_hold_no_wrong_value():
    said = kept()["outcomes"]
    assert not [cell for cell, outcome in said.items() if outcome in ("wrong", "crash")]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_primitive_in_every_form_and_way(x64):
    """Every primitive that a found function binds: forms and ways take turns, so that all pairs of them occur."""
    said, bad = Counter(), []
    for cell in cells():
        here = cell.outcome()
        said[here.partition(":")[0]] += 1
        if here.startswith(("wrong", "crash")):
            bad.append((cell.name, here[:200]))
    assert not bad, bad
    assert said["ok"] > sum(said.values()) / 2, said
