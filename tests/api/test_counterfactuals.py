"""What a plan answers later: plans that people write by hand, and what a step takes without a choice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.report.page import plan_page
from autopar.search.counterfactuals import ALTERNATIVES
from benchmarks.families import unet
from benchmarks.family_bytes import CLUSTER as BALANCED
from examples import gpt
from tests.api.steps import CLUSTER
from tests.api.test_eval import batch, new_state, train_step
from tests.end_to_end.test_segments import activations, least_bytes
from tests.end_to_end.test_uneven_sizes import drawn as uneven
from tests.end_to_end.test_uneven_sizes import head
from tests.end_to_end.test_update_in_backward import TIMES, adam, state_bytes
from tests.search.problems import toy


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.parallelize(train_step, cluster=CLUSTER, num_stages=1, num_microbatches=1).plan(new_state(), batch())


@pytest.mark.slow
def test_alternatives_are_on_every_page_and_in_no_file(plan: Plan) -> None:
    saved = plan.to_json()
    text, page = str(plan.with_alternatives()), plan_page(plan)
    assert "against alternatives" in text and "against alternatives" in page
    assert "against alternatives" not in str(plan)  # a text is no search
    assert not any(name in saved for name in ALTERNATIVES) and plan.to_json() == saved
    rows = {o.name: o for o in plan.with_alternatives().search.considered if o.name in ALTERNATIVES}
    assert set(rows) == set(ALTERNATIVES)
    for name in ("zero1", "zero3"):
        by_hand = autopar.parallelize(train_step, cluster=CLUSTER, num_microbatches=1, search=name)
        expected = by_hand.plan(new_state(), batch())
        assert (rows[name].step_time, rows[name].peak_memory) == (expected.step_time, expected.peak_memory)
    assert all(o.step_time is None or o.step_time >= plan.step_time * (1 - 1e-9) for o in rows.values())
    for shown in (replace(plan, again=None), Plan.from_json(saved)):
        assert "against alternatives" not in str(shown) and "against alternatives" not in plan_page(shown)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_alternatives_of_a_plan_in_blocks_are_the_plans_asked_for_by_name(microbatches: int) -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 4, "vocab": 16, "seq": 16, "batch": 8}
    step, args = gpt.build("tiny", abstract=True, **sizes)
    asked = {"cluster": toy(4), "num_stages": 1, "num_microbatches": microbatches, "attention": "blocks"}
    found = autopar.parallelize(step, **asked, remat="none").plan(*args)
    assert found.stages[0].form.block_scores == 1
    rows = {o.name: o for o in found.with_alternatives().search.considered if o.name in ALTERNATIVES}
    for name in ALTERNATIVES:
        expected = autopar.parallelize(step, search=name, **asked).plan(*args)
        assert rows[name].step_time == pytest.approx(expected.step_time, rel=1e-3), name


def drawn_problem(number: int) -> tuple[str, Any, Any, dict[str, Any]]:
    """A technique, a step whose plan has it, its arguments, and what is asked for, drawn by number."""
    rng, technique = random.Random(number), ("block_scores", "padded", "segment_layers", "backward_update")[number % 4]
    asked: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}
    if technique == "block_scores":
        step, args = gpt.build("tiny", abstract=True, layers=1, hidden=16, heads=4, vocab=16, seq=16, batch=8)
        return technique, step, args, {**asked, "cluster": toy(rng.choice((2, 4))), "attention": "blocks"}
    if technique == "padded":
        vocab, devices = rng.choice((2053, 3079, 4099)), rng.choice((4, 8))
        args = uneven(16, vocab), uneven(6, 16), jnp.arange(6) * 300
        return technique, head, args, {**asked, "cluster": toy(devices), "remat": "none"}
    devices = rng.choice((1, 2))
    asked |= {"cluster": toy(devices, flops=1e12, bandwidth=1e11), "batch_argnums": 1, "donate_argnums": 0}
    if technique == "segment_layers":
        step, args = activations(remat=rng.random() < 0.5)
        limit = rng.uniform(1.03, 1.2) * least_bytes(step, args, devices)
    else:
        step, args = adam()
        limit = rng.uniform(TIMES, 1.35) * state_bytes(args) / devices
    return technique, step, args, {**asked, "memory_limit": int(limit)}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(14))
def test_alternatives_of_drawn_plans_are_the_plans_asked_for_by_name(x64: None, number: int) -> None:
    """Of plans with blocks, padding, segments and layers updated in the backward loop; some have none."""
    technique, step, args, asked = drawn_problem(number)
    found = autopar.parallelize(step, **asked).plan(*args)
    assert getattr(found.stages[0].form, technique)
    rows = {o.name: o for o in found.with_alternatives().search.considered if o.name in ALTERNATIVES}
    for name in random.Random(number).sample(ALTERNATIVES, 3):
        try:
            expected = autopar.parallelize(step, search=name, **asked).plan(*args).step_time
        except InfeasiblePlanError:
            expected = None
        assert rows[name].step_time == (expected and pytest.approx(expected, rel=1e-3)), name


def test_without_a_choice_everything_else_is_chosen_again(plan: Plan) -> None:
    assert plan.again is not None
    planned = 0
    for choice in sorted(plan.content.choices, key=lambda k: -k.cost)[:6]:
        other = plan.again.without(choice.name)
        assert other is not None
        text = plan.explain(choice.name)
        assert "its cost" not in text or "(everything else as it is)" in text
        if other.step_time is None:
            continue
        planned += 1
        assert other.name != choice.choice and "with everything else chosen again" in text
        # The plan is optimal: without a choice nothing is faster, and no worse than the next best with the rest fixed.
        assert other.step_time >= plan.step_time * (1 - 1e-3)
        if choice.runner_up_cost is not None:
            fixed_s = plan.search.objective - choice.cost + choice.runner_up_cost
            assert other.step_time <= fixed_s * (1 + 1e-3)
    assert planned


@pytest.mark.slow
def test_no_split_of_space_is_faster_without() -> None:
    """Of a U-Net with few images rows or columns are split, as `explain` says; no plan without that is faster."""
    step, args = unet(2, 8, 32)
    plan = autopar.parallelize(step, cluster=BALANCED, num_stages=1, num_microbatches=1).plan(*args)
    images = [k for k in plan.content.choices if k.name.startswith("jvp()/conv_general_dilated")]
    assert len(images) >= 5
    assert plan.again is not None
    for choice in images:
        _, made = choice.choice.split(" -> ")
        rows, columns = made.strip("[]").split(",")[1:3]
        assert (rows, columns) != (".", "."), choice
        assert made in plan.explain(choice.name)
        other = plan.again.without(choice.name)
        assert other is not None and other.step_time is not None and other.step_time >= plan.step_time * (1 - 1e-9)


@pytest.mark.slow
def test_what_is_chosen_again_keeps_the_memory_limit(plan: Plan) -> None:
    limit = plan.peak_memory
    tight = autopar.parallelize(
        train_step, cluster=CLUSTER, num_stages=1, num_microbatches=1, memory_limit=limit, remat="none"
    ).plan(new_state(), batch())
    assert tight.again is not None
    for choice in sorted(tight.content.choices, key=lambda k: -k.cost)[:4]:
        other = tight.again.without(choice.name)
        assert other is not None and (other.peak_memory is None or other.peak_memory <= limit)
