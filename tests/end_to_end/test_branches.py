"""Independent branches side by side train to the same values as the plain function on one device."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

import autopar
from autopar import InfeasiblePlanError, Plan
from examples import mlp
from tests.end_to_end.compare import assert_same
from tests.end_to_end.towers import Towers, drawn


def compare(towers, microbatches, steps=2):
    with jax.enable_x64(True):
        fn, args = towers.build()
        return assert_same(
            fn,
            args,
            steps=steps,
            rtol=1e-10,
            num_stages="auto",
            num_microbatches=microbatches,
            schedule="branches",
        ).plan(*args)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_towers_on_halves_of_the_devices(microbatches):
    plan = compare(Towers((2, 2)), microbatches)
    assert sorted({s.devices for s in plan.stages}) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert "branches side by side: state[0]['tower0'] on devices" in str(plan)
    assert plan.content.pipeline.table.startswith(
        f"schedule branches, 3 stages, {microbatches} microbatches, after - | - | 0 1"
    )


@pytest.mark.slow
def test_a_trunk_a_tied_matrix_and_a_global_norm():
    plan = compare(Towers((1, 2), trunk=1, clip=True, tied=True, momentum=True), 2, steps=1)
    assert plan.num_stages == 4


@pytest.mark.slow
def test_towers_that_a_contrastive_loss_joins_over_the_batch():
    compare(Towers((1, 1), join="contrast"), 1, steps=1)


def compare_drawn(number):
    towers = drawn(number)
    compare(towers, 1 if towers.join == "contrast" else (1, 2, 4)[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_drawn_towers(number):
    compare_drawn(number)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_drawn_towers_on_fewer_devices(devices):
    code = f"""
import jax
from tests.end_to_end.test_branches import compare_drawn
assert len(jax.devices()) == {devices}
for number in range(24, 30):
    compare_drawn(number)
print("equal")
"""
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("equal\n"), done.stderr


@pytest.mark.slow
def test_a_saved_plan_runs(tmp_path):
    with jax.enable_x64(True):
        fn, args = Towers((1, 1)).build()
        plan = autopar.parallelize(fn, schedule="branches", num_microbatches=1).plan(*args)
        plan.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json")
        assert again.content == plan.content
        assert_same(fn, args, plan=again, rtol=1e-10)


def test_a_step_without_branches_is_refused():
    fn, args = mlp.build()
    with pytest.raises(InfeasiblePlanError, match="no independent branches"):
        autopar.parallelize(fn, schedule="branches").plan(*args)
