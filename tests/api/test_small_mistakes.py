"""Mistakes that were tracebacks, or messages that told half: each names the value and the remedy."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import AutoparError, InfeasiblePlanError, PlanMismatchError
from autopar.errors.names import known_names, near_names
from autopar.sharding.registry import register_rule, unregister_rule
from tests.search.problems import f32, momentum, toy


def step(*, layers=2):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    return momentum(loss, [f32(16, 16)] * layers, f32(32, 16))


def plan(**options):
    function, args = step()
    return autopar.parallelize(function, cluster=toy(8), donate_argnums=0, **options).plan(*args)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(8, "mesh_shape=(8,) for one axis"), ("24", "as mesh_shape=(2, 4)"), ((2, 0), "as mesh_shape")],
)
def test_a_mesh_shape_that_is_none(value, remedy):
    with pytest.raises(AutoparError, match=re.escape(f"mesh_shape={value!r} is not a mesh shape")) as error:
        plan(mesh_shape=value)
    assert remedy in error.value.remedy


def test_a_rule_that_returns_no_rule():
    register_rule("tanh", lambda op, types: 3)
    try:
        with pytest.raises(AutoparError, match="the rule of tanh returned 3") as error:
            plan(num_stages=1)
    finally:
        unregister_rule("tanh")
    assert "returns a Rule" in error.value.cause and "test_small_mistakes.py" in error.value.source


def test_a_plan_is_saved_into_a_missing_folder(tmp_path):
    made, path = plan(num_stages=1), tmp_path / "missing" / "plan.json"
    with pytest.raises(PlanMismatchError, match=re.escape(f"cannot write the plan '{path}'")) as error:
        made.save(path)
    assert error.value.remedy == f"make the folder '{path.parent}' first" and not path.parent.exists()


def test_more_stages_than_devices():
    with pytest.raises(InfeasiblePlanError, match="cannot be cut into 99 stages on the 8 devices of toy") as error:
        plan(num_stages=99)
    assert "num_stages=8 or fewer" in error.value.remedy


def test_sizes_and_times_have_units():
    assert autopar.parallelize(step()[0], memory_limit="80000000000 bytes").options.memory_limit_bytes == 80 * 10**9
    assert re.search(r"step [\d.]+ [mun]?s, [\d.]+ \w+ a device\)$", repr(plan(num_stages=1)))
    with pytest.raises(InfeasiblePlanError, match="fit 1 kB a device"):
        plan(search="zero3", memory_limit=1000)
    notes = plan(num_stages=1).notes
    assert not any(re.search(r"\de[-+]?\d+ s\b|\d{7,} bytes", note) for note in notes)


def test_lists_that_are_cut_say_so():
    many = [f"name{n:02}" for n in range(40)]
    assert known_names("alpq", ["alpa", "beam"]) == "did you mean 'alpa'? known: alpa, beam"
    assert known_names("zzz", ["alpa", "beam"]) == "known: alpa, beam"
    assert near_names("name07", many).endswith("(5 of 40)") and "name07" in near_names("name07", many)
    assert known_names("name7", many) == near_names("name7", many)
    assert near_names("w['A']", ["w['b']", "w['a']"]).startswith("near names: w['a']")
    with pytest.raises(PlanMismatchError, match=r"near names: .* \(\d of \d+\)"):
        plan(num_stages=1).explain("stat[")
