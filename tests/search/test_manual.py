"""Plans that a person names: where state lies, what it costs, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.ir import Layout
from autopar.search import Manual, restrict, strategy_named
from examples import gpt, mlp
from tests.search.problems import problem_of, toy


@pytest.fixture(scope="module")
def problem():
    fn, args = gpt.build(abstract=True, layers=1)
    return problem_of(fn, args, toy(8))


def layouts(plan, role):
    return [Layout.parse(i.layout) for i in plan.content.inputs if i.role == role]


@pytest.mark.slow
def test_tensor_parallelism_splits_matrices_and_data_parallelism_the_batch(problem):
    plan = Manual(tp=2, dp=4)(problem)
    assert plan.stages[0].mesh_shape == {"x": 4, "y": 2}
    assert all(k.dims[0] == ("x",) and k.axes == ("x",) for k in layouts(plan, "batch"))
    assert not any("x" in k.axes for role in ("parameter", "optimizer") for k in layouts(plan, role))
    whole = sum(i.type.nbytes for i in problem.graph.inputs if i.role == "parameter")
    assert plan.stages[0].memory.parameters == pytest.approx(whole / 2, rel=0.05)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_zero_stages_divide_the_state(problem, tp):
    dp = 8 // tp
    zero = [Manual(tp=tp, dp=dp, zero=z)(problem).stages[0].memory for z in range(4)]
    assert zero[1].optimizer == pytest.approx(zero[0].optimizer / dp, rel=0.05)
    assert zero[1].parameters == pytest.approx(zero[0].parameters, rel=0.05)  # small ones may lie otherwise
    assert zero[2] == zero[1]
    assert zero[3].optimizer == pytest.approx(zero[0].optimizer / dp, rel=0.05)
    assert zero[3].parameters == pytest.approx(zero[0].parameters / dp, rel=0.05)


@pytest.mark.slow
def test_zero_3_gathers_a_layer_at_a_time_and_sums_its_gradients_in_parts():
    fn, args = gpt.build(abstract=True, scan=True, layers=4, hidden=256, seq=64, vocab=256, batch=64, clip=None)
    step = autopar.parallelize(fn, cluster=toy(4), search=Manual(dp=4, zero=3), num_microbatches=2, num_stages=1)
    (stage,) = step.plan(*args).stages
    widest = 4 * 256 * 256 * 4  # a matrix of the feed-forward network, of one layer
    sent = [c for c in stage.collectives if c.bytes >= widest]
    gathers, sums = ([c for c in sent if c.kind == kind] for kind in ("all-gather", "reduce-scatter"))
    # Two such matrices a layer, four layers, two microbatches, each gathered in both passes and summed once.
    assert {c.bytes for c in (*gathers, *sums)} == {widest}
    assert (sum(c.count for c in gathers), sum(c.count for c in sums)) == (32, 16)
    assert not [c for c in sent if c.kind not in ("all-gather", "reduce-scatter")]


@pytest.mark.slow
def test_registered_zero_stages_are_manual_ones(problem):
    for stage in (1, 2, 3):
        plan = strategy_named(f"zero{stage}")(problem)
        named = Manual(dp=8, zero=stage)(problem)
        assert (plan.stages, plan.content.inputs) == (named.stages, named.content.inputs)
        assert plan.search.strategy == f"zero{stage}"
    assert strategy_named("manual")(problem).search.objective == Manual(dp=8)(problem).search.objective


def test_megatron_is_the_best_of_its_grids():
    fn, args = mlp.build(abstract=True, layers=2)
    problem = problem_of(fn, args, toy(8))
    plan = strategy_named("megatron")(problem)
    by_hand = [Manual(tp=tp, dp=8 // tp)(problem).search.objective for tp in (1, 2, 4, 8)]
    assert plan.search.objective == min(by_hand)
    assert [c.step_time for c in plan.search.considered] == pytest.approx(by_hand)
    assert sum(c.note == "chosen" for c in plan.search.considered) == 1


def test_tensor_parallelism_stays_inside_a_node():
    fn, args = mlp.build(abstract=True, layers=1)
    plan = strategy_named("megatron")(problem_of(fn, args, toy(8, nodes=4)))
    assert [c.name for c in plan.search.considered] == ["tp=1, dp=8", "tp=2, dp=4"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp": 2}, "2 devices; toy has 8"),
        ({"dp": 4, "pp": 2}, "names 2 stages; 1 are asked for"),
        ({"dp": 8, "cp": 2}, "tp=1 times cp=2 times dp=8 are 16 devices"),
        ({"dp": 8, "chunks": 2}, "chunks=2"),
        ({"dp": 8, "recompute": "full"}, "jax.checkpoint"),
    ],
)
def test_what_cannot_be_priced_is_refused(problem, fields, text):
    with pytest.raises(InfeasiblePlanError, match=text):
        Manual(**fields)(problem)


@pytest.mark.parametrize("asked", [None, 2])
def test_a_graph_alone_is_not_cut(problem, asked):
    with pytest.raises(InfeasiblePlanError, match="made from a graph alone"):
        Manual(dp=4, pp=2)(replace(problem, job=replace(problem.job, num_stages=asked)))


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        ({"dp": 2, "pp": 2}, {"num_stages": 1}, "names 2 stages; 1 are asked for"),
        ({"dp": 2, "pp": 2}, {"num_stages": 4}, r"names 2 stages; 4 are asked for[\s\S]*num_stages=2"),
        ({"pp": 2}, {}, "pp=2 times tp=1 times dp=1 are 2 devices; toy has 4"),
        ({"dp": 4}, {"num_stages": 2}, "dp=4 are 4 devices; a stage has 2"),
    ],
)
def test_degrees_that_are_not_those_of_the_request_are_refused(fields, options, text):
    fn, args = mlp.build(abstract=True, layers=4)
    with pytest.raises(InfeasiblePlanError, match=text):
        autopar.parallelize(fn, cluster=toy(4), search=Manual(**fields), **options).plan(*args)


@pytest.mark.parametrize("fields", [{"tp": 0}, {"dp": True}, {"zero": 4}, {"recompute": "some"}, {"chunks": 1.5}])
def test_impossible_numbers_are_refused(fields):
    with pytest.raises(AutoparError, match=next(iter(fields))):
        Manual(**fields)


def test_it_is_given_to_parallelize():
    fn, args = mlp.build(abstract=True, layers=1)
    plan = autopar.parallelize(fn, cluster=toy(8), search=Manual(tp=4, dp=2, zero=1)).plan(*args)
    assert plan.search.strategy == "manual"
    assert plan.stages[0].mesh_shape == {"x": 2, "y": 4}
    assert any("tp=4, dp=2, zero=1" in note for note in plan.content.notes)


@pytest.mark.parametrize("name", ["data-parallel", "zero1", "replicated"])
def test_a_mesh_that_a_named_plan_does_not_have_is_noted(name):
    problem = problem_of(*mlp.build(abstract=True, layers=1), toy(8), mesh_shape=(2, 4))
    (note,) = (n for n in strategy_named(name)(problem).content.notes if "2x4" in n)
    assert "not used" in note
    same = problem_of(*mlp.build(abstract=True, layers=1), toy(8), mesh_shape=(8,))
    assert not any("not used" in n for n in strategy_named("data-parallel")(same).content.notes)


def test_the_level_of_recomputation_that_parallelize_names_holds_for_stages(problem):
    asked = replace(problem, job=replace(problem.job, remat="full"))
    assert Manual(pp=2)._remat(asked) == "full"
    assert Manual(pp=2, recompute="selective")._remat(problem) == "selective"
    assert Manual(pp=2)._remat(problem) == "none"
    with pytest.raises(InfeasiblePlanError, match="name different levels"):
        Manual(pp=2, recompute="selective")._remat(asked)


def test_tensor_parallelism_gathers_no_matrix_however_many_tokens_there_are():
    """Of many tokens it would be cheaper to gather the matrices, which is another plan than the one that is named."""
    fn, args = mlp.build(abstract=True, layers=2, hidden=32, batch=4096)
    large = problem_of(fn, args, toy(4))
    plan = Manual(tp=4)(large)
    assert all(k.axes == () for k in layouts(plan, "batch"))
    products = [o for o in plan.content.operators if "dot_general" in o.id and "transpose" not in o.id]
    assert products and not any("x" in Layout.parse(r).dims[0] for o in products for r in o.results)


@pytest.mark.parametrize(("degrees", "batch"), [({"tp": 4}, 4), ({"dp": 4}, 8), ({"dp": 2, "tp": 2}, 8)])
def test_no_device_repeats_the_product_of_another_however_slow_the_links_are(degrees, batch):
    """On such links each device would rather do all of the work than send anything."""
    fn, args = mlp.build(abstract=True, layers=2, hidden=32, batch=batch)
    slow = toy(4, bandwidth=1e3, latency_s=1.0, flops=1e15)
    plan = Manual(**degrees)(problem_of(fn, args, slow))
    axes = dict(zip(degrees, plan.stages[0].mesh_shape, strict=True))
    products = [o for o in plan.content.operators if "dot_general" in o.id and "transpose" not in o.id]
    for result in (Layout.parse(r) for o in products for r in o.results):
        if "tp" in axes:
            assert axes["tp"] in (*result.dims[-1], *result.partial)
        if "dp" in axes:
            assert axes["dp"] in result.dims[0]
    assert products


def test_gradients_of_positions_are_summed_once_a_step():
    """Microbatches sent each of them: zeros to which a lookup's gradient is added were no term of a sum."""
    fn, args = gpt.build(abstract=True, scan=True, layers=2, hidden=64, seq=64, batch=32, vocab=64)
    slow = toy(4, bandwidth=1e6, latency_s=1e-3, flops=1e12)
    plan = autopar.parallelize(fn, cluster=slow, search=Manual(dp=4), num_stages=1, num_microbatches=8).plan(*args)
    assert not [c for c in plan.communication if c.count % 8 == 0 and any("loop" in o for o in c.operators)]


@pytest.mark.parametrize(("stack", "awaited"), [("megatron", 1.0), ("megatron-core", 0.1), ("xla", 0.0)])
def test_a_stage_awaits_the_share_of_its_sends_that_the_stack_says(stack, awaited):
    fn, args = mlp.build(abstract=True, layers=2)
    cluster = autopar.Cluster.load("dgx-a100", nodes=2, stack=stack)
    halves = replace(cluster, groups=tuple(replace(g, devices_per_node=1) for g in cluster.groups))
    plan = autopar.parallelize(fn, cluster=halves, search=Manual(pp=2), num_microbatches=2, schedule="1f1b").plan(*args)
    record = plan.content.pipeline
    first = next(w for w in record.works if (w.kind, w.stage) == ("forward", 0))
    link_s = sum(t.seconds for t in record.transfers if t.source == 0)
    computed_s = dict(plan.stages[0].work_times)["forward"] / 2
    sent_s = (first.seconds - computed_s) + link_s
    assert sent_s > 0 and first.seconds - computed_s == pytest.approx(awaited * sent_s, abs=1e-12)


def test_remat_reaches_the_stages_of_a_pipeline():
    fn, args = mlp.build(abstract=True, layers=2)
    plan = autopar.parallelize(
        fn, cluster=toy(2), search=Manual(pp=2), num_microbatches=2, schedule="1f1b", remat="full"
    ).plan(*args)
    assert {s.form.remat for s in plan.stages} == {"full"}


def test_layouts_that_are_ruled_out_are_one_problem(problem, monkeypatch):
    """A problem is checked when it is made, which costs as much as it is large."""
    made = []
    plain = restrict.with_allowed
    monkeypatch.setattr(restrict, "with_allowed", lambda choices, left: made.append(left) or plain(choices, left))
    Manual(tp=2, dp=4)(problem)
    assert len(made) == 1 and len(made[0]) > 10
