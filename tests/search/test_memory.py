"""Memory: predictions add up, limits are kept, less memory never is faster, ZeRO falls out."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import parallelize
from autopar.errors import InfeasiblePlanError
from autopar.ir import Layout
from autopar.plan import Plan
from autopar.search import Manual, Problem, alpa, mesh_search
from autopar.search.intra import build, extract
from autopar.search.mesh_bounds import with_relaxation_only
from autopar.search.outcome import NoRoomError
from autopar.solver import peak_bytes, solve
from autopar.solver.memory import evenly_split_bytes, memory_floor
from examples import gpt, mlp, moe
from tests.search.problems import f32, problem_of, toy


def adam(layers=2, **overrides):
    return mlp.build(abstract=True, layers=layers, optimizer="adam", **overrides)


def planned(fn, args, **options):
    return parallelize(fn, cluster=toy(4), mesh_shape=(4,), donate_argnums=0, **options).plan(*args)


def shards(text):
    return Layout.parse(text).shards({"x": 4, "y": 2})


def test_kinds_add_up_to_the_peak():
    fn, args = adam()
    problem: Problem = problem_of(fn, args, toy(4))
    for shape in ((4,), (2, 2)):
        (mesh,) = problem.cluster.logical_meshes(shape)
        sharding_problem = build(problem, mesh)
        choice = solve(sharding_problem.problem).choice
        memory = extract(problem, sharding_problem, choice).memory
        assert memory.total == pytest.approx(peak_bytes(sharding_problem.problem, choice))
    plan = planned(fn, args)
    (stage,) = plan.stages
    assert stage.memory.total == plan.peak_memory
    parts = [getattr(stage.memory, k) for k in stage.memory.__struct_fields__]
    assert sum(parts) == plan.peak_memory
    assert min(parts) >= 0


def test_arguments_are_counted_as_they_lie():
    """At the fullest time all arguments are there, each with the bytes of its layout."""
    fn, args = mlp.build(abstract=True, layers=2)
    problem = problem_of(fn, args, toy(4))
    plan = parallelize(fn, cluster=toy(4), mesh_shape=(4,)).plan(*args)
    types = {i.name: i.type for i in problem.graph.inputs}
    held = {"parameter": 0, "optimizer": 0}
    for i in plan.content.inputs:
        if i.role in held:
            held[i.role] += Layout.parse(i.layout).local_bytes(types[i.path], {"x": 4})
    memory = plan.stages[0].memory
    # A new value that replaces an argument is a result, which is counted as a temporary or gradient.
    assert memory.parameters == held["parameter"]
    assert memory.optimizer == held["optimizer"]


@pytest.mark.slow
def test_less_memory_is_never_faster():
    fn, args = adam(hidden=64, batch=64)
    most = planned(fn, args)
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(fn, args, memory_limit=1000)
    fewest = caught.value.least_bytes
    assert 1000 < fewest <= most.peak_memory
    times = [planned(fn, args, memory_limit=most.peak_memory)]
    for share in (0.75, 0.5, 0.25, 0.0):
        limit = math.ceil(fewest + share * (most.peak_memory - fewest))
        times.append(planned(fn, args, memory_limit=limit))
        assert times[-1].peak_memory <= limit
        assert times[-1].content.memory_limit == limit
    found = [p.search.objective for p in times]
    assert found == sorted(found)
    assert found[-1] > found[0]
    assert all(p.search.lower_bound <= p.search.objective for p in times)


def test_what_the_limit_costs_is_said():
    fn, args = adam(hidden=64, batch=64)
    free = planned(fn, args, num_microbatches=1)
    assert free.content.search.unlimited_s is None and "unlimited_s" not in free.to_json()
    tight = planned(fn, args, num_microbatches=1, memory_limit=free.peak_memory * 3 // 4)
    assert tight.content.memory_bound and tight.search.objective > free.search.objective
    assert tight.content.search.unlimited_s == pytest.approx(free.search.objective)
    told = " ".join(str(tight).split())
    assert f"the memory limit costs at most {tight.search.objective / free.search.objective - 1:.2%}" in told
    assert Plan.from_json(tight.to_json()) == tight


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(4,), None])
def test_the_least_that_would_do_does(mesh_shape):
    fn, args = adam(layers=1, hidden=8, batch=8)
    options = {"cluster": toy(4), "mesh_shape": mesh_shape, "donate_argnums": 0}
    with pytest.raises(InfeasiblePlanError, match="the least that would do") as caught:
        parallelize(fn, memory_limit=100, **options).plan(*args)
    least = caught.value.least_bytes
    assert f"({least} bytes)" in str(caught.value)
    plan = parallelize(fn, memory_limit=least, **options).plan(*args)
    assert plan.peak_memory <= least
    with pytest.raises(InfeasiblePlanError):
        parallelize(fn, memory_limit=least - 1, **options).plan(*args)


def test_a_limit_that_does_not_bind_changes_nothing():
    fn, args = adam()
    free = planned(fn, args)
    same = planned(fn, args, memory_limit=free.peak_memory)
    assert same.content.inputs == free.content.inputs
    assert same.step_time == free.step_time


def step(params, moments, batch):
    """A train step by hand, with Adam-like moments; ``batch`` is large next to the weights."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)

    grads = jax.grad(loss)(params)
    moments = jax.tree.map(lambda m, g: (0.9 * m[0] + 0.1 * g, 0.99 * m[1] + 0.01 * g * g), moments, grads,
                           is_leaf=lambda m: isinstance(m, tuple))  # fmt: skip
    params = jax.tree.map(lambda p, m: p - m[0] / (jnp.sqrt(m[1]) + 1e-8), params, moments)
    return params, moments


def zero_case(batch):
    weights = {"w": f32(64, 64), "v": f32(64, 64)}
    return weights, {k: (w, w) for k, w in weights.items()}, f32(batch, 64)


@pytest.mark.slow
def test_zero_3_where_memory_is_short():
    """Little memory and a large batch: parameters and moments are split over all devices, the batch too."""
    args = zero_case(256)
    cluster = toy(4, flops=1e8)
    options = {"cluster": cluster, "mesh_shape": (4,), "donate_argnums": (0, 1)}
    with pytest.raises(InfeasiblePlanError) as caught:
        parallelize(step, memory_limit=1, **options).plan(*args)
    plan = parallelize(step, memory_limit=math.ceil(caught.value.least_bytes * 1.05), **options).plan(*args)
    for i in plan.content.inputs:
        if i.role in ("parameter", "optimizer"):
            assert shards(i.layout) == 4, i
    gathered = sum(c.count for c in plan.communication if c.kind in ("all-gather", "all-reduce", "reduce-scatter"))
    assert gathered > 0
    assert plan.stages[0].memory.optimizer == 2 * 2 * 64 * 64 * 4 / 4


def test_with_memory_to_spare_the_batch_is_split():
    """Much memory and a large batch: examples are split, products of weights and activations need no traffic.

    Moments may still be split (ZeRO-1): a reduce-scatter and an all-gather cost what an all-reduce does.
    """
    args = zero_case(4096)
    plan = parallelize(step, cluster=toy(4, flops=1e8), mesh_shape=(4,), donate_argnums=(0, 1)).plan(*args)
    layouts = {i.path: i.layout for i in plan.content.inputs}
    assert layouts["batch"] == "[x,.]"
    weights = 2 * 64 * 64 * 4
    sent = sum(c.count * c.bytes * (2 if c.kind == "all-reduce" else 1) for c in plan.communication)
    assert sent <= 2 * weights * 1.05  # no activation, and weights once there and once back


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_over_microbatches_needs_what_was_predicted(count):
    """Parameters that are gathered for the loop are there until it ends, and those gathered in it are not."""
    fn, args = adam(layers=4, hidden=128, batch=512)
    options = {"num_microbatches": count, "num_stages": 1, "mesh_shape": (8,), "donate_argnums": 0}
    free = parallelize(fn, cluster=toy(8), **options).plan(*args)
    least = parallelize(fn, cluster=toy(8), memory_limit=int(0.8 * free.peak_memory), **options).plan(*args)
    assert least.peak_memory < free.peak_memory
    for plan in (free, least):
        used = parallelize(fn, plan=plan, donate_argnums=0).compile(*args).memory_analysis()
        footprint = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
        assert footprint - used.alias_size_in_bytes == pytest.approx(plan.peak_memory, rel=0.15)
    assert free.stages[0].memory.gradients > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", [2, 6])
def test_new_moments_are_counted_once(layers):
    """New moments are results that the new parameters are computed from: one buffer serves both."""
    step, args = adam(layers=layers, hidden=256, batch=64)
    compiled = parallelize(step, cluster=toy(8, bandwidth=1e9, flops=1e10), donate_argnums=0).compile(*args)
    predicted, needed = compiled.plan.peak_memory, compiled.local.footprint_bytes
    assert 0.9 * needed <= predicted <= 1.1 * needed, predicted / needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build_step", "sizes"),
    [(mlp.build, {}), (moe.build, {}), (gpt.build, {"scan": True, "remat": True, "layers": 3})],
    ids=["mlp", "moe", "scanned gpt"],
)
def test_copies_of_each_phase_need_no_less_at_least(build_step, sizes):
    """So where no choice fits with copies that all phases share, none is looked for with copies of their own."""
    fn, args = build_step("tiny", abstract=True, **sizes)
    problem = problem_of(fn, args, toy(8))
    for mesh in problem.cluster.logical_meshes():
        shared, own = (memory_floor(build(problem, mesh, split_phases=s).problem) for s in (False, True))
        assert 0 < shared <= own


@pytest.mark.parametrize(
    ("build_step", "sizes"),
    [(mlp.build, {"optimizer": "adam"}), (moe.build, {}), (gpt.build, {"scan": True, "layers": 2})],
    ids=["mlp", "moe", "scanned gpt"],
)
@pytest.mark.parametrize("split_phases", (False, True))
def test_equal_pieces_need_no_more_than_any_mesh(build_step, sizes, split_phases):
    """What one mesh says of equal pieces is below the least of every mesh of as many devices."""
    fn, args = build_step("tiny", abstract=True, **sizes)
    problem = problem_of(fn, args, toy(8))
    built = [build(problem, mesh, split_phases=split_phases).problem for mesh in problem.cluster.logical_meshes()]
    least = [evenly_split_bytes(choices.usages, 8) for choices in built]
    assert len(least) > 1 and 0 < max(least) <= min(map(memory_floor, built))


def test_what_has_no_room_in_equal_pieces_is_stated_on_one_mesh(monkeypatch):
    fn, args = mlp.build("tiny", abstract=True)
    stated = []
    monkeypatch.setattr(mesh_search, "build", lambda *a, **k: (stated.append(a), build(*a, **k))[1])
    for relaxes in (False, True):
        problem = problem_of(fn, args, toy(8), memory_limit_bytes=1000, explains_infeasible=False)
        stated.clear()
        with pytest.raises(NoRoomError) as told:
            alpa(with_relaxation_only(problem) if relaxes else problem)
        assert len(stated) == 1 < len(problem.cluster.logical_meshes())
        assert told.value.least_bytes > 1000


@pytest.mark.slow
def test_what_no_mesh_can_hold_is_not_solved(monkeypatch):
    fn, args = mlp.build("tiny", abstract=True)
    solved = []
    monkeypatch.setattr(mesh_search, "solve", lambda *a, **k: (solved.append(a), solve(*a, **k))[1])
    with pytest.raises(InfeasiblePlanError, match="the least that would do is"):
        alpa(problem_of(fn, args, toy(8), memory_limit_bytes=1000))
    with pytest.raises(InfeasiblePlanError, match="it needs more") as told:
        alpa(problem_of(fn, args, toy(8), memory_limit_bytes=1000, explains_infeasible=False))
    assert not solved
    assert told.value.least_bytes is not None and told.value.least_bytes > 1000


def test_a_limit_under_what_zero_3_holds_gathers_again_in_plan_and_program():
    """What is gathered for one pass is given back before the next one: counted so, sent so, and compiled so."""
    step, args = mlp.build(layers=6, hidden=64, batch=16)
    options = {"search": Manual(dp=8, zero=3), "num_stages": 1, "num_microbatches": 1, "remat": "none"}
    given = {"cluster": toy(8, bandwidth=1e9), "donate_argnums": 0, **options}
    wide = parallelize(step, **given).plan(*args)
    limit = int(0.85 * wide.peak_memory)
    compiled = parallelize(step, memory_limit=limit, **given).compile(*jax.tree.map(np.array, args))

    def gathers(plan):
        return sum(c.count for c in plan.communication if c.kind == "all-gather")

    assert compiled.plan.peak_memory <= limit and compiled.plan.content.memory_bound
    assert gathers(compiled.plan) > gathers(wide) and compiled.plan.step_time > wide.step_time
    assert compiled.local.footprint_bytes <= 1.1 * limit
