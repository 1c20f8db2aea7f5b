"""What every registered strategy obeys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar import Plan
from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout, Literal
from autopar.ir.fingerprint import fingerprint
from autopar.search import strategies, strategy_named
from examples import mlp
from tests.end_to_end.compare import assert_same, assert_trees_same
from tests.search.problems import problem_of, toy

#: Those that come with autopar; tests of other files may register more.
NAMES = ("alpa", "data-parallel", "fsdp-tp", "manual", "megatron", "replicated", "zero1", "zero2", "zero3")

#: Those that search by trying or cut stages, on a smaller case.
RESEARCH = ("beam", "evolutionary", "exhaustive", "gpipe", "mcmc", "pipedream", "random", "reinforce")
CASES = [*((s, c) for s in NAMES for c in ("mlp", "scan")), *((s, "small") for s in RESEARCH)]


def small_step(state, batch):
    """A train step of one matrix."""
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}, value


def scan_step(state, batch):
    """A train step with a loop, a branch and a counter."""

    def loss(w):
        def body(c, w):
            return jnp.tanh(c @ w), c.sum()

        c, sums = jax.lax.scan(jax.checkpoint(body), batch["x"], w)
        return jnp.mean(c * c) + 0.01 * jnp.sum(sums)

    value, grad = jax.value_and_grad(loss)(state["w"])
    scale = jax.lax.cond(value > 1.0, lambda v: 1.0 / v, lambda v: v, value)
    return {"w": state["w"] - scale * grad, "step": state["step"] + 1}, value


def cases(name):
    if name == "mlp":
        return mlp.build(layers=2)
    key = jax.random.key(0)
    if name == "small":
        return small_step, ({"w": jax.random.normal(key, (16, 8)), "step": jnp.int32(0)}, {"x": jnp.ones((32, 16))})
    state = {"w": jax.random.normal(key, (3, 16, 16)) * 0.2, "step": jnp.int32(0)}
    return scan_step, (state, {"x": jax.random.normal(key, (16, 16))})


def all_records(graph, prefix=""):
    """(id, graph, operator) of every operator, those in regions too."""
    for op in graph.operators:
        yield prefix + op.id, graph, op
        for name, region in op.regions:
            yield from all_records(region, f"{prefix}{op.id}/{name}/")


def test_all_are_registered():
    assert {*NAMES, *RESEARCH} <= set(strategies())


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def planned(request):
    """(strategy, function, arguments, problem, plan) on eight devices."""
    name, case = request.param
    fn, args = cases(case)
    problem = problem_of(fn, args, toy(8), mesh_shape=(8,) if case == "small" else None)
    return name, fn, args, problem, strategy_named(name)(problem)


@pytest.mark.few(19)
def test_it_returns_a_plan_of_the_program(planned):
    name, _, _, problem, plan = planned
    assert isinstance(plan, Plan)
    assert plan.search.strategy == name
    assert plan.content.fingerprint == fingerprint(problem.graph)
    assert plan.stages[0].devices == tuple(range(8))
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan) and repr(plan)


def test_every_operator_has_a_record(planned):
    *_, problem, plan = planned
    generators = {"iota", "broadcast_in_dim", "optimization_barrier", "constant"}
    by_id = {r.id: r for r in plan.content.operators}
    for id, _, op in all_records(problem.graph):
        assert id in by_id or op.primitive in generators, id
    assert by_id.keys() <= {id for id, _, _ in all_records(problem.graph)}


def test_layouts_fit_shapes(planned):
    *_, problem, plan = planned
    sizes = plan.stages[0].mesh_shape
    known = {id: (graph, op) for id, graph, op in all_records(problem.graph)}
    for i, record in zip(problem.graph.inputs, plan.content.inputs, strict=True):
        layout = Layout.parse(record.layout)
        assert record.path == i.name
        assert layout.fits(i.type.shape, sizes)
        assert not layout.partial
    for r in plan.content.operators:
        graph, op = known[r.id]
        for operand, text in zip(op.operands, r.operands, strict=True):
            assert text or isinstance(operand, Literal)
            assert not text or Layout.parse(text).fits(graph.type_of(operand).shape, sizes), r
        for v, text in zip(op.results, r.results, strict=True):
            assert Layout.parse(text).fits(v.type.shape, sizes), r


def test_results_replace_arguments_where_they_lie(planned):
    *_, problem, plan = planned
    inputs = {i.path: i.layout for i in plan.content.inputs}
    updated = 0
    for o, record in zip(problem.graph.outputs, plan.content.outputs, strict=True):
        assert record.path == o.path
        assert record.updates == o.updates
        assert not Layout.parse(record.layout).partial
        if o.updates is not None:
            assert record.layout == inputs[o.updates]
            updated += 1
    assert updated >= 2


def test_numbers_are_sound(planned):
    *_, plan = planned
    (stage,) = plan.stages
    # Readers may share a conversion that each was charged for, so that the objective is an upper bound; a close one.
    assert 0.995 * plan.search.objective < plan.step_time <= plan.search.objective * (1 + 1e-9)
    assert stage.step_time == pytest.approx(stage.compute_time + sum(c.seconds for c in stage.collectives))
    assert 0 < plan.peak_memory == stage.memory.total <= plan.content.memory_limit
    if plan.search.lower_bound is not None:
        assert plan.search.lower_bound <= plan.search.objective * (1 + 1e-9)
    for c in plan.communication:
        assert c.bytes > 0 and c.count > 0 and c.seconds >= 0
        assert set(c.axis.split("+")) <= set(stage.mesh_shape)


@pytest.mark.few(9)
def test_it_runs_and_gives_the_values(planned):
    _, fn, args, _, plan = planned
    loaded = Plan.from_json(plan.to_json())
    function = assert_same(fn, args, plan=loaded, cluster=toy(8))
    placed = function.shard(*args)
    assert_trees_same(placed, args)


@pytest.mark.slow
def test_none_is_better_than_the_search():
    fn, args = mlp.build(abstract=True, layers=2, batch=2048)
    problem = problem_of(fn, args, toy(8), steps=2000)
    tried = [name for name in (*NAMES, *RESEARCH) if name != "exhaustive"]
    best = {name: strategy_named(name)(problem).search.objective for name in tried}
    assert best["alpa"] <= min(best.values()) * (1 + 1e-9)
    assert best["data-parallel"] < best["replicated"]


@pytest.mark.parametrize("name", [*NAMES, *RESEARCH])
def test_too_little_memory(name):
    fn, args = mlp.build(abstract=True, layers=2) if name in NAMES else cases("small")
    problem = problem_of(fn, args, toy(8), memory_limit_bytes=100, mesh_shape=None if name in NAMES else (8,))
    with pytest.raises(InfeasiblePlanError, match="does not fit"):
        strategy_named(name)(problem)


def test_a_batch_that_the_devices_do_not_divide():
    fn, args = mlp.build(abstract=True, layers=1, batch=6)
    problem = problem_of(fn, args, toy(8))
    with pytest.raises(InfeasiblePlanError, match="first dim of 6, which 8 devices do not divide"):
        strategy_named("data-parallel")(problem)
    plan = strategy_named("alpa")(problem)
    assert plan.step_time > 0
