"""State of the update in host memory: what may lie there, what it costs, and that it is chosen where it pays."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import Plan, parallelize
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.report.diff import diff
from autopar.search.intra import build, extract
from autopar.search.intra.host import HOST, least_device_memory, movable, share_bytes
from autopar.solver import peak_bytes, solve
from autopar.solver.evaluate import usage_profile
from autopar.solver.exhaustive import ExhaustiveSolver
from examples import mlp
from tests.search.problems import f32, graph_of, problem_of, toy


def with_hosts(cluster: Cluster, bandwidth: float = 1e8, memory: int | None = None, launch_s: float = 1e-6) -> Cluster:
    """The cluster with links of ``bandwidth`` bytes/s to hosts of ``memory`` bytes."""
    (group,) = cluster.groups
    device = dataclasses.replace(group.device, launch_s=launch_s)
    group = dataclasses.replace(group, host_bandwidth=bandwidth, host_memory_bytes=memory, device=device)
    return dataclasses.replace(cluster, groups=(group,))


def adam(**overrides):
    return mlp.build(abstract=True, layers=2, optimizer="adam", **overrides)


def momentum(state, x):
    """Several weights of different sizes, each with its momentum."""
    weights, moments = state

    def loss(weights):
        return sum(jnp.sum(jnp.tanh(w * x[: w.shape[0]]) ** 2) for w in weights)

    moments = [0.9 * m + g for m, g in zip(moments, jax.grad(loss)(weights), strict=True)]
    return [w - m for w, m in zip(weights, moments, strict=True)], moments


def momentum_problem(sizes, cluster, **options):
    shapes = [f32(n) for n in sizes]
    donated = frozenset(f"state[{part}][{i}]" for part in (0, 1) for i in range(len(sizes)))
    return problem_of(momentum, ((shapes, shapes), f32(max(sizes))), cluster, donated=donated, **options)


def hosted(plan: Plan) -> list[str]:
    return [i.path for i in plan.content.inputs if i.memory == "host"]


def test_what_the_update_alone_reads_is_movable():
    fn, args = adam()
    found = movable(graph_of(fn, *args))
    assert found and all(".mu" in name or ".nu" in name for name in found)
    assert len(found) == 8  # of two layers with a weight and a bias each


def test_what_is_returned_as_it_was_or_read_before_is_not():
    def step(state, x):
        w, m, same = state
        g = jax.grad(lambda w: jnp.sum((x @ w) ** 2) + jnp.sum(m * w))(w)
        return (w - g, m + g, same), x * 2

    assert not movable(graph_of(step, (f32(4, 4), f32(4, 4), f32(4, 4)), f32(2, 4)))


def test_it_costs_two_moves_a_step_and_no_memory_until_the_update():
    cluster = with_hosts(toy(1), bandwidth=2e6, launch_s=3e-6)
    problem = momentum_problem([64, 16], cluster, offload="auto")
    (mesh,) = problem.cluster.logical_meshes()
    sharding_problem = build(problem, mesh)
    node = sharding_problem.values["state[1][0]"].node
    device, host = sharding_problem.problem.nodes[node].costs
    assert host - device == pytest.approx(2 * (3e-6 + 64 * 4 / 2e6))
    free = list(solve(dataclasses.replace(sharding_problem.problem, limit_bytes=None)).choice)
    there = list(free)
    there[node] = 1
    _, before = usage_profile(sharding_problem.problem, tuple(free))
    _, after = usage_profile(sharding_problem.problem, tuple(there))
    first = [i for i, u in enumerate(sharding_problem.usages) if u.key == "state[1][0]" and u.kind == "optimizer"]
    assert before[0] - after[0] == 64 * 4  # at the beginning of the step
    assert len(first) == 2
    sharding = extract(problem, sharding_problem, there)
    assert sharding.hosted == {"state[1][0]"}
    assert sharding.host_bytes == 64 * 4
    assert sharding.host_s == pytest.approx(host - device)


#: One mesh and one form, in which the memory limit decides.
ONE_FORM = {"mesh_shape": (4,), "num_stages": 1, "num_microbatches": 1, "remat": "none", "donate_argnums": 0}


def test_it_is_chosen_only_where_memory_binds():
    fn, args = adam(hidden=64)
    cluster = with_hosts(toy(4, bandwidth=1e6), bandwidth=1e9)
    wide = parallelize(fn, cluster=cluster, offload="auto", **ONE_FORM).plan(*args)
    assert not hosted(wide)
    plain = parallelize(fn, cluster=cluster, **ONE_FORM).plan(*args)
    assert (wide.step_time, wide.peak_memory) == (plain.step_time, plain.peak_memory)
    limit = int(wide.peak_memory * 0.9)
    without = parallelize(fn, cluster=cluster, memory_limit=limit, **ONE_FORM).plan(*args)
    found = parallelize(fn, cluster=cluster, memory_limit=limit, offload="auto", **ONE_FORM).plan(*args)
    assert hosted(found) and not hosted(without)
    assert found.step_time < without.step_time
    assert found.peak_memory <= limit
    (stage,) = found.stages
    assert stage.step_time == pytest.approx(
        stage.compute_time + sum(c.seconds for c in stage.collectives) + stage.host_time
    )
    assert found.search.objective == pytest.approx(found.step_time)


def test_it_is_chosen_only_where_the_hosts_link_is_known_and_fast_enough():
    fn, args = adam(hidden=64)
    limit = int(parallelize(fn, cluster=toy(4, bandwidth=1e6), **ONE_FORM).plan(*args).peak_memory * 0.9)
    options = {"memory_limit": limit, "offload": "auto", **ONE_FORM}
    unknown = parallelize(fn, cluster=toy(4, bandwidth=1e6), **options).plan(*args)
    assert not hosted(unknown)
    assert any("no host_bandwidth" in note for note in unknown.notes)
    slow = with_hosts(toy(4, bandwidth=1e6), bandwidth=1.0)
    assert not hosted(parallelize(fn, cluster=slow, **options).plan(*args))


def one_weight(state, x):
    w, m = state
    m = m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    return w - m, m


def one_weight_problem(cluster, **options):
    donated = frozenset({"state[0]", "state[1]"})
    return problem_of(one_weight, ((f32(4), f32(4)), f32(8, 4)), cluster, donated=donated, **options)


@pytest.mark.parametrize(
    ("make", "devices", "host_memory"),
    [
        (lambda c, **options: momentum_problem([64, 48, 16], c, **options), 1, None),
        (lambda c, **options: momentum_problem([64, 48, 16], c, **options), 1, 300),
        (one_weight_problem, 2, None),
    ],
)
def test_the_optimum_is_that_of_exhaustive_search(make, devices, host_memory):
    cluster = with_hosts(toy(devices), memory=host_memory)
    wide = make(cluster, offload="auto")
    (mesh,) = wide.cluster.logical_meshes((devices,))
    sharding_problem = build(wide, mesh)
    free = solve(dataclasses.replace(sharding_problem.problem, limit_bytes=None))
    peak = peak_bytes(sharding_problem.problem, free.choice)
    most = 0
    for fraction in (0.95, 0.85, 0.75, 0.65):
        tight = build(make(cluster, offload="auto", memory_limit_bytes=int(peak * fraction)), mesh)
        exact, found = ExhaustiveSolver().solve(tight.problem), solve(tight.problem)
        assert found.found == exact.found
        if found.found:
            assert found.objective == pytest.approx(exact.objective, rel=1e-9)
            most = max(most, len(extract(wide, tight, found.choice).hosted))
    assert most >= 1


def test_the_memory_of_hosts_bounds_all_that_lies_there():
    cluster = with_hosts(toy(1), bandwidth=1e9, memory=300)
    assert share_bytes(cluster) == 300
    sizes = [64, 48, 16]  # 256, 192 and 64 bytes: the first two do not go together
    problem = momentum_problem(sizes, cluster, offload="auto")
    (mesh,) = problem.cluster.logical_meshes()
    free = build(problem, mesh)
    everywhere = peak_bytes(free.problem, solve(dataclasses.replace(free.problem, limit_bytes=None)).choice)
    limit = everywhere - 200
    tight = build(momentum_problem(sizes, cluster, offload="auto", memory_limit_bytes=limit), mesh)
    answer = solve(tight.problem)
    assert answer.found
    sharding = extract(problem, tight, answer.choice)
    assert sharding.hosted == {"state[1][0]"}
    assert any(u.kind == HOST for u in tight.usages)
    less = build(momentum_problem(sizes, cluster, offload="auto", memory_limit_bytes=everywhere - 300), mesh)
    assert not solve(less.problem).found
    unbounded = with_hosts(toy(1), bandwidth=1e9)
    more = build(momentum_problem(sizes, unbounded, offload="auto", memory_limit_bytes=everywhere - 300), mesh)
    assert solve(more.problem).found


def test_the_least_memory_that_would_do_is_enough_and_no_less_is():
    sizes = [64, 48, 16]
    cluster = with_hosts(toy(1), memory=300)

    def at(limit):
        problem = momentum_problem(sizes, cluster, offload="auto", memory_limit_bytes=limit)
        (mesh,) = problem.cluster.logical_meshes()
        return build(problem, mesh)

    nothing = at(8)
    least = least_device_memory(nothing.problem, nothing.usages)
    assert solve(at(math.ceil(least)).problem).found
    assert not solve(at(math.ceil(least) - 2).problem).found


def test_what_is_not_donated_is_kept_twice_by_the_host():
    cluster = with_hosts(toy(1), memory=10**6)
    shapes = [f32(64)]
    problem = problem_of(momentum, ((shapes, shapes), f32(64)), cluster, offload="auto")
    (mesh,) = problem.cluster.logical_meshes()
    (kept,) = [u for u in build(problem, mesh).usages if u.kind == HOST]
    assert np.max(kept.bytes) == 2 * 64 * 4 * problem.memory_limit_bytes / 10**6


def test_the_plan_says_it_and_loads_again():
    fn, args = adam(hidden=64)
    options = {"mesh_shape": (4,), "num_stages": 1, "num_microbatches": 1, "remat": "none", "donate_argnums": 0}
    cluster = with_hosts(toy(4, bandwidth=1e6), bandwidth=1e9)
    limit = int(parallelize(fn, cluster=cluster, **options).plan(*args).peak_memory * 0.9)
    plan = parallelize(fn, cluster=cluster, memory_limit=limit, offload="auto", **options).plan(*args)
    assert Plan.from_json(plan.to_json()) == plan
    assert "host memory:" in str(plan) and "in host memory" in str(plan)
    path = hosted(plan)[0]
    assert "in host memory" in plan.explain(path)
    without = parallelize(fn, cluster=cluster, **options).plan(*args)
    assert any("in host memory" in (p.after or "") for p in diff(without, plan).inputs)


@pytest.mark.slow
def test_the_fastest_of_microbatches_recomputation_and_host_memory_is_taken():
    fn, args = adam(hidden=64, batch=64)
    options = {"mesh_shape": (4,), "num_stages": 1, "donate_argnums": 0}
    fast, slow = (with_hosts(toy(4), bandwidth=b) for b in (1e12, 1e3))
    limit = int(parallelize(fn, cluster=fast, **options).plan(*args).peak_memory * 0.9)
    without = parallelize(fn, cluster=fast, memory_limit=limit, **options).plan(*args)
    plans = [
        parallelize(fn, cluster=c, memory_limit=limit, offload="auto", **options).plan(*args) for c in (fast, slow)
    ]
    assert hosted(plans[0]) and not hosted(plans[1])
    assert all(p.search.objective <= without.search.objective * (1 + 1e-9) for p in plans)


def test_nothing_fits():
    fn, args = adam()
    with pytest.raises(InfeasiblePlanError) as caught:
        parallelize(
            fn, cluster=with_hosts(toy(2), memory=10**9), memory_limit=1000, offload="auto", num_stages=1,
            num_microbatches=1, remat="none", donate_argnums=0,
        ).plan(*args)  # fmt: skip
    assert caught.value.least_bytes > 1000


def test_other_words_are_refused():
    with pytest.raises(AutoparError, match="is not a use of host memory"):
        parallelize(lambda x: x, offload="optimizer")
