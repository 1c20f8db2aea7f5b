"""Layers updated inside of the backward loop where memory is short: the same values, no stack of gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar import Plan, parallelize, verify
from autopar.api.steps import as_planned
from autopar.errors import InfeasiblePlanError
from autopar.lower.aot import parse_target
from autopar.lower.program import lower
from tests.end_to_end.stacked import build
from tests.lower.test_backward_update import OPTIMIZERS, model
from tests.microbatch.running import traced
from tests.search.problems import toy
from tests.versions import tolerance

LAYERS, WIDTH = 48, 16

#: A limit as a multiple of a device's share of the state, of which a stack of gradients is a third.
TIMES = 1.27
OPTIONS: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "remat": "none", "donate_argnums": 0}


def adam() -> tuple[Any, Any]:
    """A step of many small layers and its arguments."""
    return model(optax.adam(1e-2, eps=1e-4), layers=LAYERS, width=WIDTH, widths=(4 * WIDTH,), deviation=0.05)


def function(step: Any, devices: int, limit: float | None = None, bandwidth: float = 1e11, **more: Any) -> Any:
    """``step`` on so many devices, whose links are fast unless said: what is short is memory."""
    memory = {} if limit is None else {"memory_limit": int(limit)}
    cluster = toy(devices, flops=1e12, bandwidth=bandwidth)
    return parallelize(step, cluster=cluster, batch_argnums=1, **{**OPTIONS, **memory, **more})


def state_bytes(args: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))


def compiled(step: Any, plan: Plan, args: Any) -> Any:
    """The program of a plan for the first of this process's devices, and what runs it as ``step``."""
    plain, leaves = traced(step, args)
    devices = jax.devices()[: len(plan.stages[0].devices)]
    program = lower(as_planned(plain, plan), plan, devices)
    executable = program.function.lower(*leaves).compile(dict(program.compiler_options))
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*arguments: Any) -> Any:
        arrays = map(jax.device_put, jax.tree.leaves(arguments), program.input_shardings)
        return jax.tree.unflatten(tree, executable(*arrays))

    return executable, run


def bytes_used(executable: Any) -> int:
    """Bytes a device that a compiled program takes with its arguments."""
    m = executable.memory_analysis()
    return int(m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes)


def assert_trained(fn: Any, step: Any, args: Any, count: int = 2) -> None:
    """``fn`` does to its state what ``step`` does, in some steps."""
    found = wanted = jax.tree.map(np.array, args)
    plain = jax.jit(step)
    for _ in range(count):
        (state, out), (state_wanted, out_wanted) = fn(*found), plain(*wanted)
        for a, b in zip(jax.tree.leaves((state, out)), jax.tree.leaves((state_wanted, out_wanted)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        found, wanted = (state, found[1]), (state_wanted, wanted[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_values_and_memory(x64: None, devices: int) -> None:
    """Under a limit that leaves no room for a stack of gradients next to the state."""
    step, args = adam()
    limit = TIMES * state_bytes(args) / devices
    plan = function(step, devices, limit).plan(*args)
    assert plan.stages[0].form.backward_update and plan.peak_memory <= limit
    assert "layers updated inside of the backward loop" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    executable, run = compiled(step, plan, args)
    assert_trained(run, step, args)
    assert bytes_used(executable) == pytest.approx(plan.peak_memory, rel=tolerance(0.15, 0.1))


@pytest.mark.slow
def test_a_saved_plan_runs_as_it_was_made(x64: None) -> None:
    step, args = adam()
    plan = Plan.from_json(function(step, 8, TIMES * state_bytes(args) / 8).plan(*args).to_json())
    assert plan.stages[0].form.backward_update
    assert_trained(parallelize(step, plan=plan, donate_argnums=0), step, args)


def test_a_norm_of_all_gradients_waits_for_them(x64: None) -> None:
    """Clipping falls back to stacks of gradients, and the plan says which line needs them."""
    step, args = build(8, width=64, batch=512, dtype=jnp.float64, norm=0.5)
    options = {"bandwidth": 1e9, "mesh_shape": (8,)}
    with pytest.raises(InfeasiblePlanError) as error:
        function(step, 8, TIMES * state_bytes(args) / 8, **options).plan(*args)
    plan = function(step, 8, 1.01 * error.value.least_bytes, **options).plan(*args)
    assert not plan.stages[0].form.backward_update
    (note,) = (n for n in plan.content.notes if "gradients of stacks" in n)
    assert note.startswith("2.1 MB of gradients of stacks are kept") and "stacked.py" in note


def test_ample_memory_keeps_the_step_as_it_is(x64: None) -> None:
    step, args = adam()
    plan = function(step, 4).plan(*args)
    assert not plan.stages[0].form.backward_update and "backward loop" not in str(plan)


@pytest.mark.slow
def test_what_is_not_donated_is_not_written_in_place(x64: None) -> None:
    """Old and new state are both there: the limit that does with donation does not without."""
    step, args = adam()
    limit = TIMES * state_bytes(args) / 4
    assert function(step, 4, limit).plan(*args).stages[0].form.backward_update
    with pytest.raises(InfeasiblePlanError):
        function(step, 4, limit, donate_argnums=()).plan(*args)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize(("remat", "tied"), [(True, True), (False, False)])
def test_optimizers_on_several_devices(x64: None, name: str, remat: bool, tied: bool) -> None:
    step, args = model(OPTIMIZERS[name](), layers=32, width=8, widths=(16, 8), remat=remat, tied=tied, deviation=0.05)
    with pytest.raises(InfeasiblePlanError) as error:
        function(step, 4, state_bytes(args) / 4).plan(*args)
    plan = function(step, 4, 1.005 * error.value.least_bytes).plan(*args)
    assert plan.stages[0].form.backward_update
    assert_trained(compiled(step, plan, args)[1], step, args)


@pytest.mark.slow
def test_memory_that_a_gpu_needs_is_as_predicted() -> None:
    pytest.importorskip("jax_plugins.xla_cuda12")
    step, _ = build(2)
    args = jax.eval_shape(lambda: build(8, width=1024, batch=256)[1])
    target = "cuda:h100:1x8"
    share = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[0])) / 8
    plan = parallelize(
        step, cluster=parse_target(target).cluster(), memory_limit=int(1.3 * share), batch_argnums=1, **OPTIONS
    ).plan(*args)
    assert plan.stages[0].form.backward_update
    assert 0.95 < verify(plan, step, *args, target=target).memory_ratio < 1.08
