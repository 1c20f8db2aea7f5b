"""Plans as logical axis rules, which Flax turns back into the plan's shardings."""

from __future__ import annotations

import msgspec
import pytest
from jax.sharding import PartitionSpec

from autopar.errors import PlanMismatchError
from autopar.plan import InputRecord, Plan
from tests.plan.plans import small_plan

WANTED = {
    "state.params['up']": ("[.,model]", ("embed", "mlp")),
    "state.params['down']": ("[model,.]", ("mlp", "embed")),
    "batch['x']": ("[data,.]", ("batch", None)),
    "batch['both']": ("[.,data+model]", (None, "rows")),
}


def plan(**layouts):
    inputs = tuple(
        InputRecord(path, "f32[16,32]", "parameter", layouts.get(path, layout)) for path, (layout, _) in WANTED.items()
    )
    return Plan(msgspec.structs.replace(small_plan().content, inputs=inputs))


NAMES = {path: names for path, (_, names) in WANTED.items()}


def test_rules():
    assert plan().logical_axis_rules(NAMES) == [
        ("embed", None), ("mlp", "model"), ("batch", "data"), ("rows", ("data", "model")),
    ]  # fmt: skip


def test_flax_makes_the_plans_shardings_of_them():
    spmd = pytest.importorskip("flax.linen.spmd")
    rules = plan().logical_axis_rules(NAMES)
    specs = plan().partition_specs()
    for path, names in NAMES.items():
        got = spmd.logical_to_mesh_axes(names, rules)
        entries = [*specs[path], *[None] * (2 - len(specs[path]))]
        assert PartitionSpec(*got) == PartitionSpec(*entries), path


def test_names_of_their_own():
    rules = dict(plan().logical_axis_rules())
    assert rules["state.params['up']:1"] == "model" and rules["state.params['up']:0"] is None


@pytest.mark.parametrize(
    ("layouts", "names", "message"),
    [
        ({"state.params['down']": "[.,model]"}, NAMES, "dims called 'mlp' have two splits"),
        ({}, {"['x']": (None, None)}, "dim 0 of batch.* has no logical name"),
        ({}, {"['x']": ("batch",)}, "has 2 dims; 1 names"),
        ({}, {"['y']": ("batch", None)}, "no argument"),
    ],
)
def test_what_rules_cannot_say(layouts, names, message):
    with pytest.raises(PlanMismatchError, match=message):
        plan(**layouts).logical_axis_rules(names)
