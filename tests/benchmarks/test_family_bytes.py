"""Programs of families without an example, and tables dealt out by hand."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cluster import Cluster
from autopar.lower.hlo import collectives
from benchmarks import family_bytes, tables


def test_weights_lie_as_the_expert_says():
    rules = (("up", P(None, "y")), ("down", P("y", None)))
    assert family_bytes.spec_of("up0", (16, 32), "data", rules) == P()
    assert family_bytes.spec_of("up0", (16, 32), "tensor", rules) == P(None, "y")
    assert family_bytes.spec_of("down0", (16, 32), "fsdp x tensor", rules) == P("y", "x")
    assert family_bytes.spec_of("norm", (16, 32), "fsdp", rules) == P(None, "x")
    assert family_bytes.spec_of("norm", (7, 9), "fsdp", rules) == P()


def test_sizes_are_drawn_by_a_seed_and_divide_the_devices():
    for name, (build, _) in family_bytes.CASES.items():
        sizes = [family_bytes.drawn_sizes(build, random.Random(seed)) for seed in (1, 1, 2, 3, 4)]
        assert sizes[0] == sizes[1] and any(s != sizes[0] for s in sizes), name
        assert all(n % 8 == 0 for s in sizes for key, n in s.items() if key != "layers")
    step, args = build(**sizes[0])
    assert jax.eval_shape(step, *args)[1].shape == ()


@pytest.mark.slow
def test_examples_lie_along_the_axis_of_experts():
    _, rules = family_bytes.CASES["two-level experts"]
    assert rules[0][1] == P("y", None, None)
    assert family_bytes.spec_of("expertup", (8, 16, 32), "expert", rules) == P("y", None, None)
    assert family_bytes.spec_of("gate", (16, 2), "expert", rules) == P()


def test_only_gradients_along_the_axis_that_splits_them_count_half():
    """An activation may have as many bytes as a weight, and an axis of its own."""
    params = {"up0": jax.ShapeDtypeStruct((16, 32), jnp.float32), "norm": jax.ShapeDtypeStruct((7,), jnp.float32)}
    halved = family_bytes.gradients_by_hand(params, "fsdp x tensor", (("up", P(None, "y")),))
    assert halved.bytes == {16 * 32 * 4 // 4}
    lines = [
        f"  %{name} = f32[{n}] all-reduce(%p{n}), replica_groups={groups}, to_apply=%add"
        for name, n, groups in (
            ("gradient", 128, "{{0,4},{1,5},{2,6},{3,7}}"),
            ("activation", 128, "{{0,1,2,3},{4,5,6,7}}"),
            ("whole", 512, "{{0,4},{1,5},{2,6},{3,7}}"),
        )
    ]
    text = "\n".join(
        [
            "HloModule m, num_partitions=8", "%add (x: f32[], y: f32[]) -> f32[] {", "  %x = f32[] parameter(0)",
            "  %y = f32[] parameter(1)", "  ROOT %s = f32[] add(%x, %y)", "}", "ENTRY %main () -> f32[128] {",
            "  %p128 = f32[128] parameter(0)", "  %p512 = f32[512] parameter(1)", *lines,
            "  ROOT %r = f32[128] add(%gradient, %activation)", "}",
        ]
    )  # fmt: skip
    assert family_bytes.sent_bytes(text, halved) == 512 / 2 + 2 * 3 / 4 * 512 + 2048
    assert family_bytes.sent_bytes(text) == 512 + 2 * 3 / 4 * 512 + 2048


@pytest.mark.slow
def test_experts_behind_two_gates_are_split():
    """The planned program has all-to-alls and sends no more than expert parallel by hand."""
    build, rules = family_bytes.CASES["two-level experts"]
    options = {"num_stages": 1, "num_microbatches": 1, "donate_argnums": 0}
    step, args = build()
    text = autopar.parallelize(step, cluster=family_bytes.CLUSTER, **options).compile(*args).as_text()
    assert any(c.kind == "all-to-all" and c.full_bytes > 16 for c in collectives(text))
    assert family_bytes.sent_bytes(text) <= family_bytes.by_hand(build(), "expert", rules)


@pytest.mark.slow
def test_a_small_dlrm_sends_no_more_than_with_tables_dealt_out():
    ours = family_bytes.planned(tables.as_written())
    assert ours <= family_bytes.sent_bytes(tables.table_wise())


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [family_bytes.CLUSTER, family_bytes.FAST])
def test_packed_tables_send_no_more_than_tables_by_hand(cluster: Cluster):
    """Each table lies whole on one device, and rows go by all-to-all."""
    step, args = tables.dealt()
    options = {"num_stages": 1, "num_microbatches": 1, "donate_argnums": 0, **tables.SPLIT_SLOTS}
    compiled = autopar.parallelize(step, cluster=cluster, **options).compile(*args)
    assert compiled.plan.input_shardings[0]["tables"][0] is not None
    sent = [c.full_bytes for c in collectives(compiled.as_text()) if c.kind == "all-to-all"]
    assert sent.count(tables.BATCH * tables.TABLES * tables.WIDTH * 4) == 2
    assert family_bytes.sent_bytes(compiled.as_text()) <= family_bytes.sent_bytes(tables.table_wise())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["hypernetwork", "two towers", "unet", "convolutions over time", "two-level experts", "adapters"]
)
def test_no_more_is_sent_than_by_the_best_expert(name: str):
    build, rules = family_bytes.CASES[name]
    best = min(family_bytes.by_hand(build(), form, rules) for form in family_bytes.FORMS)
    assert family_bytes.planned(build()) <= best * 1.001
