"""A figure is one number under one name: of the plan, in text, JSON and HTML, and the sum of its parts."""

from __future__ import annotations

import itertools
import json
import random
import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.plan.text import AGAINST, bytes_text, seconds_text
from autopar.report.page import plan_page
from autopar.report.sections import sections
from examples import mlp
from tests.api.steps import CLUSTER
from tests.search.problems import f32, momentum, toy

PLANS = [
    {},
    {"num_microbatches": 4},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "1f1b"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved"},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "zb-h1"},
    {"num_stages": 4, "num_microbatches": 4, "schedule": "chimera"},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", PLANS, ids=lambda o: str(o.get("schedule", o)))
def test_peak_memory_is_one_number(options):
    step, args = mlp.build("tiny")
    plan = autopar.parallelize(step, cluster=CLUSTER, **options).plan(*args)
    totals = [s.memory.total for s in plan.stages]
    assert max(totals) == plan.peak_memory == plan.content.peak_memory
    written = json.loads(plan.to_json())["plan"]
    assert max(sum(s["memory"].values()) for s in written["stages"]) == written["peak_memory"] == plan.peak_memory
    peak = bytes_text(plan.peak_memory)
    assert f"{peak} a device predicted" in str(plan)
    rows = [line for line in str(plan).splitlines() if line.strip().endswith(peak)]
    assert rows, "no row of the table has the peak as its total"
    assert peak in plan_page(plan)
    assert autopar.simulate(plan).peak_memory == plan.peak_memory
    if plan.num_stages > 1:
        assert any(s.memory.in_flight for s in plan.stages)


def drawn_plan(seed):
    """A plan of a perceptron of layers of any width, with anything asked for."""
    r = random.Random(seed)
    widths = [r.choice((64, 128, 256)) for _ in range(r.randint(3, 6))]

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    step, args = momentum(loss, [f32(a, b) for a, b in itertools.pairwise(widths)], f32(64, widths[0]))
    cluster = r.choice((toy(4), autopar.Cluster.load("dgx-a100")))
    options = {
        "num_stages": r.choice((1, 1, 2)),
        "num_microbatches": r.choice((1, 2, 4)),
        "remat": r.choice(("none", "full")),
    }
    if options["num_stages"] == 1 and r.random() < 0.5:
        free = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args)
        options["memory_limit"] = int(free.peak_memory * 0.9)
    try:
        return autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args)
    except autopar.InfeasiblePlanError:
        return autopar.parallelize(step, cluster=cluster, donate_argnums=0, num_stages=1).plan(*args)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6))
def test_figures_of_one_name_are_one_figure(seed):
    plan = drawn_plan(seed)
    text, page, stages = str(plan), plan_page(plan), json.loads(plan.to_json())["plan"]["stages"]
    step, peak = seconds_text(plan.step_time), bytes_text(plan.peak_memory)
    assert set(re.findall(r"step time: *(.*) predicted", text)) == {step}
    assert set(re.findall(r"peak memory: *(.*) a device predicted", text)) == {peak}
    assert set(re.findall(r"<span>step time</span><b>(.*?)</b>", page)) == {step}
    assert set(re.findall(r"<span>peak memory</span><b>(.*?)</b>", page)) == {peak}
    # Of other plans only, or of options by estimates, which are called so.
    named = {s.title for s in sections(plan) if {"step time", "peak memory"}.intersection(s.header)}
    assert named <= {AGAINST}
    exposed = max(s["step_time"] - s["compute_time"] - s.get("host", {}).get("move_time", 0.0) for s in stages)
    total = max(sum(c["seconds"] for c in s.get("collectives", ()) if c["kind"] != "send") for s in stages)
    stated = re.compile(r"([\d.]+ \w+) in total(?: on the stage with most)?, ([\d.]+ \w+) exposed")
    for shown in (text, page):
        assert {(seconds_text(total), seconds_text(max(0.0, exposed)))} == set(stated.findall(shown)) or not any(
            s.get("collectives") for s in stages
        )
    if len(stages) == 1 and exposed > 1e-3 * plan.step_time:
        assert f"exposed communication {seconds_text(exposed)}" in page


def test_saved_inputs_of_layers_are_activations():
    """Stacks that the backward loop reads were called temporaries while it runs."""

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    step, args = momentum(loss, f32(16, 32, 32), f32(1024, 32))
    (stage,) = autopar.parallelize(step, cluster=toy(1), donate_argnums=0, num_stages=1).plan(*args).stages
    saved = 16 * 1024 * 32 * 4
    assert saved <= stage.memory.activations < 3.5 * saved and stage.memory.temporaries < saved / 2
