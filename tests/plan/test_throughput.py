"""Tokens, utilization and dollars of a plan, by hand-made figures."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import msgspec
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.plan import InputRecord
from autopar.plan.throughput import Throughput, throughput, throughput_text
from tests.plan.plans import small_plan


def content(*batch: tuple[str, str], **changes):
    inputs = tuple(InputRecord(path, type_text, "batch", "[]") for path, type_text in batch)
    return msgspec.structs.replace(small_plan().content, inputs=inputs, **changes)


def priced(dollars: float | None = None) -> Cluster:
    cluster = Cluster.load("dgx-a100", nodes=2)
    return dataclasses.replace(
        cluster, groups=tuple(dataclasses.replace(g, device_dollars_per_hour=dollars) for g in cluster.groups)
    )


def test_tokens_are_those_of_the_largest_integers_with_most_examples() -> None:
    c = content(("t", "i32[32,128]"), ("y", "i32[32,64]"), ("mask", "f32[32,999]"), ("n", "i32[]"), ("z", "u8[5,7]"))
    t = throughput(c)
    assert (t.examples, t.tokens) == (32, 32 * 128)
    assert throughput(content(("x", "f32[8,4]"))).tokens == 0
    assert throughput(content()).examples == 0


def test_utilization_and_dollars_by_hand() -> None:
    c = content(
        ("t", "i32[10,100]"),
        cluster=priced(2.0).to_json(),
        step_time=2.0,
        product_flops=(("bf16", 16 * 312e12), ("f32", 16 * 156e12 / 2)),
    )
    t = throughput(c)
    assert t.utilization == pytest.approx((1.0 + 0.5) / 2.0)
    assert t.dollars_per_hour == 32.0
    assert t.dollars_per_million == pytest.approx(32.0 * 2 / 3600 / 1000 * 1e6)
    assert throughput_text(t) == (
        "500 tokens/s, 5 examples/s, model FLOPs utilization 75.0%, $32.00 an hour, $17.8 a million tokens"
    )
    assert throughput(content(cluster=priced().to_json())).dollars_per_hour is None


def test_nothing_is_said_where_nothing_is_known() -> None:
    t = throughput(content())
    assert t == Throughput(0, 0, 0.0021, 0.0, None)
    assert throughput_text(t) == ""


def test_products_count_loops_and_both_passes() -> None:
    def step(w, x):
        def loss(w):
            return jnp.sum(jax.lax.scan(lambda c, m: (c @ m, None), x, w)[0] ** 2)

        return jax.grad(loss)(w)

    w, x = jnp.zeros((3, 8, 8)), jnp.zeros((4, 8))
    forward = 3 * 2 * 4 * 8 * 8
    # The gradient of the first trip's carry is not needed, yet the loop computes it.
    plan = autopar.parallelize(step, cluster=priced(1.0), num_stages=1, num_microbatches=1).plan(w, x)
    assert plan.content.product_flops == (("f32", 3.0 * forward),)
    assert plan.throughput.dollars_per_hour == 16.0
    assert autopar.Plan.from_json(plan.to_json()) == plan
