"""Segments of layers where memory is short: chosen between what layers and what segments need, and the same values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from autopar import Plan
from autopar.errors import InfeasiblePlanError
from tests.end_to_end.test_update_in_backward import assert_trained, bytes_used, compiled, function
from tests.lower.test_backward_update import model
from tests.versions import tolerance

LAYERS, WIDTH, EXAMPLES = 16, 8, 128

#: Of the tests that compare bytes: so many layers that stacks of what segments leave weigh more than the values of one,
#: which compilers order and copy at will. Two of these are 16% of the memory of 16 layers.
MANY_LAYERS = 64


def activations(layers: int = LAYERS, **options: Any) -> tuple[Any, Any]:
    """A step whose activations are most of its memory, and its arguments."""
    step, args = model(
        optax.adam(1e-2, eps=1e-4), layers=layers, width=WIDTH, widths=(2 * WIDTH,), deviation=0.05, **options
    )
    return step, (args[0], jnp.arange(3 * EXAMPLES, dtype=jnp.int32).reshape(EXAMPLES, 3) % 5)


def planned(step: Any, args: Any, devices: int, limit: float | None = None, **options: Any) -> Plan:
    return function(step, devices, limit, **{"remat": "auto", **options}).plan(*args)


def least_bytes(step: Any, args: Any, devices: int, **options: Any) -> int:
    """Bytes that the least plan needs, by the error of one that has far too few."""
    with pytest.raises(InfeasiblePlanError) as error:
        planned(step, args, devices, 1000, **options)
    assert error.value.least_bytes is not None
    return error.value.least_bytes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("remat", [True, False])
def test_values_and_memory(x64: None, devices: int, remat: bool) -> None:
    """Under a limit between what segments need and what all layers leave."""
    step, args = activations(MANY_LAYERS, remat=remat)
    limit = 1.03 * least_bytes(step, args, devices)
    assert limit < 0.9 * least_bytes(step, args, devices, remat="none")
    plan = planned(step, args, devices, limit)
    assert plan.peak_memory <= limit
    stage = plan.stages[0]
    assert stage.form.segment_layers and MANY_LAYERS % stage.form.segment_layers == 0
    executable, run = compiled(step, plan, args)
    assert_trained(run, step, args)
    assert bytes_used(executable) == pytest.approx(plan.peak_memory, rel=tolerance(0.15, 0.1))


def test_the_plan_says_so_and_runs_when_it_is_loaded(x64: None) -> None:
    step, args = activations()
    plan = planned(step, args, 2, 1.03 * least_bytes(step, args, 2))
    layers = plan.stages[0].form.segment_layers
    assert f"segments of {layers} layers" in str(plan) and plan.stages[0].form.remat == "none"
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert_trained(compiled(step, loaded, args)[1], step, args)


@pytest.mark.slow
def test_several_microbatches(x64: None) -> None:
    """In a number that was asked for, with gradients that are added up."""
    step, args = activations()
    plan = planned(step, args, 4, 1.03 * least_bytes(step, args, 4, num_microbatches=4), num_microbatches=4)
    assert plan.num_microbatches == 4 and plan.stages[0].form.segment_layers
    assert_trained(compiled(step, plan, args)[1], step, args)


@pytest.mark.slow
def test_more_microbatches_are_taken_where_they_are_faster(x64: None) -> None:
    """They compute as much as one, and where links cost nothing no longer."""
    step, args = activations()
    limit = 1.03 * least_bytes(step, args, 2)
    options: dict[str, Any] = {"num_microbatches": "auto", "bandwidth": 1e13}
    plan = planned(step, args, 2, limit, **options)
    alone = planned(step, args, 2, limit, bandwidth=1e13)
    assert alone.stages[0].form.segment_layers and plan.step_time <= alone.step_time
    assert plan.num_microbatches > 1 and not plan.stages[0].form.segment_layers


@pytest.mark.slow
def test_ample_memory_and_what_was_asked_for(x64: None) -> None:
    """Nothing is recomputed where all fits, nor where `remat` says so."""
    step, args = activations()
    plan = planned(step, args, 4)
    assert not plan.stages[0].form.segment_layers and "segments" not in plan.to_json() + str(plan)
    limit = 1.03 * least_bytes(step, args, 4)
    with pytest.raises(InfeasiblePlanError):
        planned(step, args, 4, limit, remat="none")


@pytest.mark.slow
def test_stacks_of_state_are_updated_in_segments_too(x64: None) -> None:
    """Under a limit that leaves room neither for a stack of gradients nor for what all layers leave."""
    step, args = model(optax.adam(1e-2, eps=1e-4), layers=MANY_LAYERS, width=24, widths=(96,), deviation=0.05)
    args = (args[0], jnp.arange(3 * EXAMPLES, dtype=jnp.int32).reshape(EXAMPLES, 3) % 5)
    plan = planned(step, args, 4, 1.02 * least_bytes(step, args, 4))
    stage = plan.stages[0]
    assert stage.form.segment_layers > 1 and stage.form.backward_update
    executable, run = compiled(step, plan, args)
    assert_trained(run, step, args)
    assert bytes_used(executable) == pytest.approx(plan.peak_memory, rel=tolerance(0.15, 0.1))
