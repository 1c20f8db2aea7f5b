"""What is shown of operators: lines, forms, a timeline of one stage, and a measured step beside it."""

from __future__ import annotations

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.report.page import plan_page
from autopar.search.cache import PlanCache
from tests.search.problems import toy

S = jax.ShapeDtypeStruct


def train_step(params, batch):
    def loss(p):
        h = jnp.tanh(batch @ p["w"])
        return jnp.mean(jnp.einsum("bh,ho->bo", h, p["v"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda a, g: a - 0.1 * g, params, grads), value


SHAPES = ({"w": S((64, 256), "float32"), "v": S((256, 32), "float32")}, S((512, 64), "float32"))


def looped(params, batch):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)[0] ** 2)


@pytest.fixture(scope="module", params=["local-cpu", "dgx-a100"])
def plan(request):
    return autopar.parallelize(train_step, cluster=request.param, num_stages=1, num_microbatches=1).plan(*SHAPES)


def test_an_operator_shows_its_line_its_form_and_its_types(plan):
    text = plan.explain("dot_general.0")
    assert "test_details.py:" in text and "(train_step" in text
    assert "ab,bc->ac  f32[512,64] f32[64,256] -> f32[512,256]" in text
    page = re.sub("<[^>]*>", "", plan_page(plan))
    assert "test_details.py:" in page and "f32[512,64] f32[64,256]" in page


def test_every_operator_has_a_detail(plan):
    assert {o.id for o in plan.content.operators} <= {d.id for d in plan.details.operators}
    assert all("->" in d.form for d in plan.details.operators)


def test_details_are_saved_and_change_no_plan(plan):
    loaded = autopar.Plan.from_json(plan.to_json())
    assert loaded == plan and loaded.details == plan.details and loaded.to_json() == plan.to_json()
    bare = autopar.Plan(plan.content)
    assert bare == plan and "details" not in bare.to_json() and "at:" not in bare.explain("dot_general.0")


def test_the_timeline_ends_with_the_step_and_has_its_peak(plan):
    timeline = autopar.simulate(plan)
    assert max(s.end_s for s in timeline.slices) == pytest.approx(plan.step_time, rel=1e-9)
    assert max(sum(p.bytes.values()) for p in timeline.kinds) == pytest.approx(plan.peak_memory)
    by_resource = {}
    for s in timeline.slices:
        by_resource.setdefault(s.resource, []).append(s)
    for slices in by_resource.values():  # no loop here: a resource does one thing at a time
        assert all(a.end_s <= b.start_s * (1 + 1e-9) + 1e-15 for a, b in itertools.pairwise(slices))
    computed = sum(s.end_s - s.start_s for s in by_resource["compute"])
    assert computed == pytest.approx(plan.stages[0].compute_time, rel=1e-6)


def test_perfetto_gets_a_thread_a_resource_and_memory_by_kind(plan, tmp_path):
    autopar.simulate(plan).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert "compute" in names and any("links" in n for n in names) == bool(plan.communication)
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "memory by kind"]
    assert counters and {"parameters"} <= counters[0]["args"].keys()
    assert any(e.get("name", "").endswith("dot_general.0") for e in events if e["ph"] == "X")


@pytest.mark.parametrize("cluster", ["local-cpu", "dgx-a100"])
def test_operators_of_a_loop_lie_inside_of_it(cluster):
    shapes = (S((6, 64, 64), "float32"), S((256, 64), "float32"))
    plan = autopar.parallelize(looped, cluster=cluster, num_stages=1, num_microbatches=1).plan(*shapes)
    slices = autopar.simulate(plan).slices
    (loop,) = [s for s in slices if s.name.endswith("scan.0") and s.resource == "compute"]
    inner = [s for s in slices if s.name.startswith(loop.name + "/") and s.resource == "compute"]
    assert inner and all(loop.start_s <= s.start_s and s.end_s <= loop.end_s * (1 + 1e-9) for s in inner)
    assert max(s.end_s for s in slices) == pytest.approx(plan.step_time, rel=1e-9)


def test_a_measured_step_beside_the_prediction(tmp_path):
    args = jax.tree.map(lambda s: jnp.asarray(np.ones(s.shape), s.dtype), SHAPES)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.local(), donate_argnums=0, num_stages=1)
    found = autopar.profile(step, *args, steps=2)
    assert found.step_s > 0 and any(r.measured_s > 0 for r in found.rows)
    products = next(r for r in found.rows if r.kind == "dot_general")
    assert products.predicted_s > 0 and "dot_general" in str(found)
    assert not args[0]["w"].is_deleted()
    found.save(str(tmp_path / "both.json"))
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    titles = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {"predicted", "measured"}


def by_hand(params, batch):
    """Four equal layers, each on a line of its own: stages of two layers are isomorphic."""

    def loss(p):
        h = jnp.tanh(batch @ p[0])
        h = jnp.tanh(h @ p[1])
        h = jnp.tanh(h @ p[2])
        h = jnp.tanh(h @ p[3])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda a, g: a - 0.1 * g, params, grads), value


def stacked(params, batch):
    value, grads = jax.value_and_grad(looped)(params, batch)
    return params - 0.1 * grads, value


STAGED = [
    (by_hand, ([S((64, 64), "float32")] * 4, S((32, 64), "float32"))),
    (stacked, (S((4, 64, 64), "float32"), S((32, 64), "float32"))),
]


def staged(fn, args, **options):
    step = autopar.parallelize(fn, cluster=toy(4), num_stages=2, num_microbatches=2, **options)
    return step.plan(*args)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("fn", "args"), STAGED, ids=["by hand", "stacked"])
def test_choices_of_stages_show_their_stage_line_and_form(fn, args, remat):
    plan = staged(fn, args, remat=remat)
    paths = {i.path for i in plan.content.inputs}
    dearest = sorted(plan.content.choices, key=lambda k: -k.cost)
    products = [k for k in dearest if "dot_general" in k.name]
    assert {k.stage for k in products} == {0, 1}
    for k in products:
        detail = plan.details.of(k.name, k.stage)
        assert "test_details.py:" in detail.source, k.name
        assert "->" in detail.form or not k.name.startswith("microbatches/"), k.name
    assert not any(k.name in paths and plan.details.of(k.name, k.stage) for k in dearest)
    text = plan.explain()
    blocks = [block for block in text.split("\n\n") if "dot_general" in block.splitlines()[0]]
    assert blocks and all(re.search(r"  on: +stages? [01]", b) and "  at:  " in b for b in blocks)
    page = re.sub("<[^>]*>", "", plan_page(plan))
    assert "source lines" in page and "test_details.py:" in page
    assert autopar.Plan.from_json(plan.to_json()).explain() == text


def test_isomorphic_stages_have_lines_of_their_own():
    plan = staged(*STAGED[0])
    lines = {0: set(), 1: set()}
    for d in plan.details.operators:
        if "dot_general" in d.id and d.form:
            for stage in d.stages:
                lines[stage].add(int(re.search(r"test_details.py:(\d+)", d.source)[1]))
    assert len(lines[0] | lines[1]) == 4 and max(lines[0]) < min(lines[1])


def test_stages_of_a_search_that_was_ended_and_of_the_cache_have_lines(monkeypatch, tmp_path):
    whole = staged(*STAGED[1])
    assert staged(*STAGED[1], time_limit_s=0).details.operators
    monkeypatch.setattr("autopar.api.pure.plan_cache", lambda _: PlanCache(tmp_path, least_s=0.0))
    assert staged(*STAGED[1]).details.operators == whole.details.operators
    monkeypatch.setattr("autopar.search.operator_details.every_operator", None)
    assert staged(*STAGED[1]).details.operators == whole.details.operators
