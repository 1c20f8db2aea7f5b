"""Models, schedules, numbers of stages and of microbatches together: pipelines train as one device does.

All combinations would take a day on one core. `CELLS` has every pair of any two of (kind of model, family of schedules,
stages, microbatches) that can be, and `SMALL_CELLS` every pair of (schedule, stages, microbatches, recomputed or
not) for a small model with uneven layers.
"""

from __future__ import annotations

import itertools

import jax
import pytest

import autopar
from autopar import ScheduleError
from autopar.schedule import get, schedules
from autopar.schedule.without_flush.schedules import flushes
from examples import gpt, llama, mlp, moe, wide_resnet
from tests.end_to_end.compare import difference, host, one_device
from tests.end_to_end.covering import covering, pairs_of

TEXT = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 16, "seq": 4, "batch": 8}
MODELS = {
    "gpt": (gpt.build, {**TEXT, "dropout": 0.1, "clip": 1.0, "masked": True}),
    "llama": (llama.build, {**TEXT, "kv_heads": 2}),
    "moe": (moe.build, {}),
    "wide_resnet": (wide_resnet.build, {}),
    "mlp": (mlp.build, {"layers": 5}),
}
TRAINING = tuple(s for s in schedules() if s not in ("inference", "table", "ampnet", "branches") and flushes(s))
#: One of each kind: all backward passes at the end; in turn; several stages a worker; weight gradients apart; two ways.
FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "chimera")
STAGES, MICROBATCHES, STEPS = (1, 2, 3, 4), (1, 2, 4, 8), 5


def can_be(schedule, stages, microbatches):
    if stages == 1:
        return schedule == "1f1b"  # one stage has no schedule
    if stages == 3 and get(schedule).chunks > 1:
        return False
    try:
        get(schedule).table(stages, microbatches)
    except ScheduleError:
        return False
    return True


def model_can_be(name, schedule, stages, microbatches):
    return can_be(schedule, stages, microbatches)


def small_can_be(schedule, stages, microbatches, remat):
    return can_be(schedule, stages, microbatches)


FACTORS = (tuple(m for m in MODELS if m != "mlp"), FAMILIES, STAGES, MICROBATCHES)
SMALL_FACTORS = (TRAINING, STAGES, MICROBATCHES, ("none", "full"))
CELLS, SMALL_CELLS = covering(FACTORS, model_can_be), covering(SMALL_FACTORS, small_can_be)


def largest_differences(name, stages, microbatches, schedule, dtype, remat="auto"):
    """The largest difference of any leaf after `STEPS` steps by its norm, and the largest of any step's loss."""
    build, overrides = MODELS[name]
    fn, args = build(dtype=dtype, **overrides)
    step = autopar.parallelize(
        fn,
        num_stages=stages,
        num_microbatches=microbatches,
        schedule="none" if stages == 1 else schedule,
        remat=remat,
    )
    plan = step.plan(*args)
    assert (plan.num_stages, plan.num_microbatches) == (stages, microbatches)
    plain = jax.jit(fn)
    ours, theirs = one_device(tuple(args)), one_device(tuple(args))
    losses = []
    for _ in range(STEPS):
        got, want = step(*ours), plain(*theirs)
        losses.append(difference(host(got[1]["loss"]), host(want[1]["loss"])))
        ours, theirs = (got[0], *ours[1:]), (want[0], *theirs[1:])
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(difference(host(a), host(b)) for a, b in leaves), max(losses)


def cell_name(cell):
    return "-".join(map(str, cell))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_models(cell, record_property, x64):
    name, schedule, stages, microbatches = cell
    leaf, loss = largest_differences(name, stages, microbatches, schedule, "float64")
    record_property("largest", max(leaf, loss))
    assert leaf <= 1e-10 and loss <= 1e-10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", SMALL_CELLS, ids=cell_name)
def test_a_small_model(cell, record_property, x64):
    schedule, stages, microbatches, remat = cell
    leaf, loss = largest_differences("mlp", stages, microbatches, schedule, "float64", remat)
    record_property("largest", max(leaf, loss))
    assert leaf <= 1e-10 and loss <= 1e-10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_losses_in_single_precision(name, record_property):
    _, loss = largest_differences(name, 2, 4, "1f1b", "float32")
    record_property("largest", loss)
    assert loss <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cells", "factors", "allowed"),
    [(CELLS, FACTORS, model_can_be), (SMALL_CELLS, SMALL_FACTORS, small_can_be)],
    ids=["models", "small model"],
)
def test_the_cells_have_every_pair(cells, factors, allowed):
    every = [cell for cell in itertools.product(*factors) if allowed(*cell)]
    assert set().union(*map(pairs_of, cells)) == set().union(*map(pairs_of, every))
    for n, values in enumerate(factors):
        assert {cell[n] for cell in cells} == set(values)
    assert len(cells) < len(every) / 3
