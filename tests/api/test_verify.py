"""`autopar.verify`: plans compiled in a process of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import AutoparError, PlanMismatchError
from autopar.lower.aot import parse_target
from autopar.plan.text import bytes_text

SHAPES = {"w": (64, 64), "x": (4096, 64)}


def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def arguments():
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES.values())


def planned(target: str) -> autopar.Plan:
    return autopar.parallelize(step, cluster=parse_target(target).cluster(), donate_argnums=0).plan(*arguments())


def installed(target: str) -> None:
    try:
        parse_target(target).check_installed()
    except AutoparError as error:
        pytest.skip(error.fact)


@pytest.mark.parametrize("target", ["cpu:4", "tpu:v5e:2x4", "cuda:h100:1x8"])
def test_compiled_collectives_are_the_predicted_ones(target: str) -> None:
    installed(target)
    plan = planned(target)
    found = autopar.verify(plan, step, *arguments(), target=target)
    assert plan.communication
    assert found.collectives_ok, str(found)
    assert found.totals and found.fusions > 0 and found.compiled_memory.total > 0
    assert (found.cycles is not None) == target.startswith("tpu")
    assert found.hlo.startswith("HloModule")
    said, done = found.planned_step_s, found.compiled_step_s
    assert done.products_s > 0 and done.memory_s > 0 and 0 < done.exposed_s <= done.collectives_s
    assert said.products_s > 0 and said.total_s == pytest.approx(plan.step_time)
    assert done.collectives_s == pytest.approx(said.collectives_s, rel=0.25)
    assert (done.said > 0.5) == (not target.startswith("cpu"))


def test_mistakes_are_said_before_anything_is_compiled() -> None:
    plan = planned("cpu:4")
    with pytest.raises(PlanMismatchError, match="the plan is for 4 devices"):
        autopar.verify(plan, step, *arguments(), target="tpu:v5p:4x4x4")
    with pytest.raises(AutoparError, match="no target is called 'gpu'"):
        autopar.verify(plan, step, *arguments(), target="gpu")
    with pytest.raises(PlanMismatchError, match="made for step"):
        autopar.verify(plan, lambda w, x: w, *arguments(), target="cpu:4")


def test_the_compiler_in_the_loop() -> None:
    options = {"donate_argnums": 0, "search": "megatron"}
    plan = autopar.parallelize(step, verify="cpu:4", **options).plan(*arguments())
    assert len(plan.stages[0].devices) == 4
    found = autopar.verify(plan, step, *arguments(), target="cpu:4")
    (note,) = [n for n in plan.content.notes if n.startswith("compiled for cpu:4: the fastest of 1")]
    assert f"{bytes_text(found.footprint_bytes)} a device where" in note
    (row,) = [c for c in plan.content.search.considered if c.note.startswith("compiled for cpu:4")]
    assert (row.name, row.peak_memory) == ("megatron", found.footprint_bytes)
    assert row.step_time == pytest.approx(found.corrected_step_s)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu:4", "tpu:v5e:2x2", "cuda:h100:1x4"])
def test_a_limit_holds_for_the_compiled_program(target: str) -> None:
    installed(target)
    free = autopar.parallelize(step, verify=target, donate_argnums=0).plan(*arguments())
    kinds = [c for c in free.content.search.considered if c.note.startswith(f"compiled for {target}")]
    assert len(kinds) > 1
    least = min(c.peak_memory for c in kinds if c.peak_memory is not None)
    plan = autopar.parallelize(step, verify=target, donate_argnums=0, memory_limit=least).plan(*arguments())
    assert autopar.verify(plan, step, *arguments(), target=target).footprint_bytes <= least


def test_a_target_of_another_size_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="the plan is for 8 devices"):
        autopar.parallelize(step, cluster="local-cpu", verify="cpu:4", search="zero1").plan(*arguments())
    with pytest.raises(AutoparError, match="no target is called 'gpu'"):
        autopar.parallelize(step, verify="gpu")
