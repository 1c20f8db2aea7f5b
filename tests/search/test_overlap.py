"""Steps whose collectives run in parallel with computation, against critical paths written by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import autopar
from autopar import Cluster
from autopar.search import strategy_named
from autopar.search.bound import work_bound_s
from autopar.search.clock import Clock
from autopar.search.intra import build, overlap_objective
from autopar.search.intra.collectives import JOINED, Ends, combined
from autopar.search.intra.overlap import RegionSchedule, TimedTask, Transfer, list_schedule
from autopar.search.intra.overlap_objective import LinkIdleTime, with_overlap, with_state_hidden
from autopar.search.policy import OverlapPolicy, SearchPolicy
from autopar.search.restrict import restricted_plan, solve_restricted
from autopar.solver import ChoiceProblem, Edge, Node, Solution, Status
from benchmarks.drawn import draw, plan_of
from benchmarks.fixed_plans import perceptron
from examples import gpt, mlp
from tests.search.problems import f32, problem_of, toy

CARD = Cluster.load("dgx-a100").part(0, 1)


def steps(text: str) -> list[TimedTask]:
    """``"a3 b2"``: task a of 3 seconds, then b of 2, which takes what a makes; with ``*`` it takes nothing."""
    found: list[TimedTask] = []
    for word in text.split():
        needs = (found[-1].id,) if found and "*" not in word else ()
        found.append(TimedTask(word[0], float(word[1:].rstrip("*")), needs))
    return found


def sends(text: str) -> list[Transfer]:
    """``"a>b:4"``: 4 seconds inside a node from a to b; ``"a>b!4"`` between nodes; nothing for start or end."""
    found = []
    for word in text.split():
        link = "inter" if "!" in word else "intra"
        ends, seconds = word.split("!" if "!" in word else ":")
        producer, consumer = ends.split(">")
        found.append(Transfer(producer, consumer, link, float(seconds)))
    return found


@pytest.mark.parametrize(
    ("tasks", "transfers", "seconds"),
    [
        ("", "", 0),
        ("a3 b2", "", 5),
        ("a3 b2", "a>b:4", 9),  # nothing between: exposed
        ("a3 b2 c2", "a>c:1", 7),  # hidden by b
        ("a3 b2 c2", "a>c:4", 9),  # two of four are hidden
        ("a3 b2", ">a:4", 9),  # an input that the first needs
        ("a3 b2", ">b:4", 6),  # one that is gathered while the first runs
        ("a3 b2", ">b:2", 5),
        ("a3 b2", "b>:4", 9),  # a result
        ("a3 b2", "a>:4", 7),  # a gradient that is reduced while the rest runs
        ("a3 b2", "a>:1", 5),
        ("a3 b3 c3", "a>:4 b>:4 c>:4", 15),  # one link: 3, then three times 4
        ("a3 b3 c3", "a>:4 b>!4 c>:4", 13),  # two links: 3 to 7, 6 to 10, 9 to 13
        ("a1 b1 c1", ">a:1 >b:1 >c:1", 4),  # parameters are gathered one ahead
        ("a1 b1 c1", ">a:2 >b:2 >c:2", 7),
        ("a1 b5 c1", "a>c:2 a>c:3", 7),  # one made of the other, both hidden
        ("a1 b5 c1", "a>c:4 a>c!3", 9),  # in a row over two links
        ("a2 b2 c2 d2", "a>c:3 b>d:3", 10),  # c at 5, the second from 5 to 8
        ("a2 b2 c2 d2", "a>c!3 b>d:3", 9),
        ("a2 b9 c2", "a>c:3 a>c:3 b>:1", 13),
        ("a3 b2*", ">a:4", 7),  # the second runs while the first waits
        ("a3 b1 c5*", "a>b:4", 9),  # and the third, so that the second needs not wait for long
        ("a3 b1 c5* d1", "a>b:4 c>d:4", 13),
    ],
)  # fmt: skip
def test_critical_paths(tasks, transfers, seconds):
    assert list_schedule(steps(tasks), sends(transfers)).seconds == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize(
    ("tasks", "transfers", "groups", "seconds"),
    [
        ("a3 b3 c3", "a>:4 b>:4 c>:4", [(0, 1, 2)], 21),  # after the last: 9 and three times 4
        ("a3 b3 c3", "a>:4 b>:4 c>:4", [(0, 1)], 18),  # 6 to 14, then the last
        ("a3 b3 c3", "a>:4 b>!4 c>:4", [(0, 2)], 17),  # the other link at 6
        ("a1 b1 c1", ">a:2 >b:2 >c:2", [(0, 1, 2)], 9),  # the first waits for all
        ("a1 b1 c1", ">a:2 >b:2 >c:2", [(1, 2)], 8),  # 2 to 6
        ("a2 b2 c2 d2", "a>c:3 b>d:3", [(0, 1)], 14),  # both from 4 to 10
    ],
)  # fmt: skip
def test_what_is_sent_as_one_starts_when_all_its_values_are_there(tasks, transfers, groups, seconds):
    assert list_schedule(steps(tasks), sends(transfers), groups).seconds == pytest.approx(seconds, abs=1e-12)


CHAIN = tuple(() if n == 0 else (n - 1,) for n in range(9))


def sums(*ends, limit=100.0, kinds="all-reduce", needs=CHAIN):
    """Groups of sums of 10 bytes with these places of who makes and who takes them, each task of the one before it."""
    kinds = [kinds] * len(ends) if isinstance(kinds, str) else kinds
    sent = [SimpleNamespace(kind=kind, axis="x", weight=1.0, bytes=10) for kind in kinds]
    stack = SimpleNamespace(combine_bytes=limit, gather_bytes=0.0)
    return combined(stack, sent, {n: Ends(*pair) for n, pair in enumerate(ends)}, needs)


def test_collectives_are_joined_up_to_a_threshold_and_never_with_what_they_are_made_of():
    assert sums((0, 9), (1, 9), (2, 9)) == ((0, 1, 2),)
    assert sums((0, 9), (1, 9), (2, 9), limit=25.0) == ((0, 1),)
    assert sums((0, 1), (1, 9), (2, 9)) == ((1, 2),)  # the second is made of the first
    assert sums((0, 1), (2, 3), needs=((), (0,), (), (2,))) == ((0, 1),)  # of two chains
    assert sums((0, 9), (0, 9), (1, 9), (2, 9)) == ((1, 2, 3),)  # the second is made of the first
    assert sums((0, 9), (1, 9), kinds="all-to-all") == sums((0, 9), (1, 9), kinds="all-gather") == ()
    assert sums((0, 9), (1, 9), (2, 9), kinds=["all-reduce", "reduce-scatter", "all-reduce"]) == ((0, 2),)


def test_of_groups_that_would_wait_for_each_other_the_later_ends_where_it_would():
    """All-reduces are joined before reduce-scatters, as in XLA's passes."""
    # Two pairs crosswise: each would need what the other brings.
    kinds = ["all-reduce", "reduce-scatter", "all-reduce", "reduce-scatter"]
    needs = ((), (), (1,), (), (), (), (5,), ())
    assert sums((0, 1), (4, 5), (6, 7), (2, 3), kinds=kinds, needs=needs) == ((0, 2),)
    # Gradients are scattered, then summed. The first sum is sent with a scalar, of which the other gradients are made.
    kinds = ["reduce-scatter", "all-reduce", "all-reduce", "reduce-scatter", "all-reduce", "reduce-scatter"]
    ends = ((0, 9), (0, 9), (1, 3), (4, 9), (4, 9), (5, 9))
    assert sums(*ends, kinds=kinds) == ((1, 2), (3, 5))


def test_steps_of_conversions_are_joined_step_by_step():
    """Two gradients are scattered inside of nodes, then summed across: one collective of each kind."""
    twice = ["reduce-scatter", "all-reduce"]
    assert sums((0, 9), (0, 9), (1, 9), (1, 9), kinds=twice * 2) == ((0, 2), (1, 3))
    assert len(sums((0, 9), (0, 9), (1, 9), (1, 9), kinds=[*twice, *twice[::-1]])) == 1  # two would wait for each other


@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(1, 8), st.sampled_from(JOINED)), max_size=12),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=10),
)
def test_joined_collectives_never_block_each_other(drawn, edges):
    """Whatever is joined, every task runs, and no step is longer than all that it does in turn."""
    names = "abcdefg"
    pairs = [(p, p + by, kind) for p, by, kind in drawn if p + by <= len(names)]
    ends = {n: Ends(p, c) for n, (p, c, _) in enumerate(pairs)}
    needs = [{p for p, c in (*edges, *((p, c) for p, c, _ in pairs)) if c == n and 0 <= p < n} for n in range(7)]
    sent = [SimpleNamespace(kind=kind, axis="x", weight=1.0, bytes=10) for *_, kind in pairs]
    groups = combined(SimpleNamespace(combine_bytes=35.0, gather_bytes=35.0), sent, ends, [sorted(n) for n in needs])
    called = ("", *names, "")
    transfers = [Transfer(called[p + 1], called[c + 1], "x", 2.0) for p, c, _ in pairs]
    tasks = [TimedTask(name, 1.0, tuple(names[p] for p in sorted(of))) for name, of in zip(names, needs, strict=True)]
    timing = list_schedule(tasks, transfers, groups)
    assert timing.ends_s.keys() == {"", *names}
    assert 7 <= timing.seconds <= 7 + 2 * len(pairs)
    assert timing.seconds == pytest.approx(7 + sum(timing.stall_s.values()))


@pytest.mark.parametrize("transfers", ["a>b:4", "a>c:1", ">b:4 a>c:2", "b>:4 a>b!1"])
def test_waits_and_work_are_the_step(transfers):
    timing = list_schedule(steps("a3 b2 c2"), sends(transfers))
    assert timing.seconds == pytest.approx(7 + sum(timing.stall_s.values()), abs=1e-12)
    assert 7 <= timing.seconds <= 7 + sum(t.seconds for t in sends(transfers))


def _planned(cluster):
    """Gradients of two products over two devices that share the batch."""

    def step(w1, w2, x):
        h = x @ w1
        g = (h @ w2) * 2.0
        return w1 - x.T @ (g @ w2.T), w2 - h.T @ g

    problem = problem_of(step, (f32(2048, 2048), f32(2048, 2048), f32(8192, 2048)), cluster)
    (mesh,) = cluster.logical_meshes((2,))
    rows = "x"

    def allowed(i, layouts):
        wanted = ((rows,), ()) if i.type.shape[0] == 8192 else ((), ())
        return [k.dims == wanted for k in layouts]

    clock = Clock()
    return restricted_plan(problem, solve_restricted(problem, mesh, allowed, clock), "data-parallel", clock)


def test_a_gradient_is_reduced_while_the_next_is_computed():
    plan = _planned(Cluster.load("dgx-a100").part(0, 2))
    together = sum(c.seconds for c in plan.communication) + plan.stages[0].compute_time
    assert plan.search.objective == pytest.approx(together, rel=1e-5)
    assert plan.step_time < 0.97 * together
    assert plan.step_time >= max(sum(c.seconds for c in plan.communication), plan.stages[0].compute_time)
    assert plan.search.lower_bound <= plan.step_time
    assert any("overlap with computation" in note for note in plan.content.notes)


def test_small_gradients_are_sent_as_one():
    """Eight biases' gradients over 64 devices: the plan tells the seconds of one collective, not of eight."""
    cluster = Cluster.load("dgx-a100", nodes=8)

    def step(biases, x):
        g = jax.grad(lambda bs: sum((jnp.tanh(x + b) ** 2).sum() for b in bs))(biases)
        return [b - 0.1 * d for b, d in zip(biases, g, strict=True)]

    problem = problem_of(step, ([f32(1024)] * 8, f32(65536, 1024)), cluster)
    plan = strategy_named("data-parallel")(problem)
    (record,) = plan.communication
    cost = problem.cost_model
    (mesh,) = cluster.logical_meshes((64,))
    assert (record.kind, record.count) == ("all-reduce", 8)
    together_s = cost.collective_s("all-reduce", 8 * 4096, ("x",), mesh)
    apart_s = 8 * cost.collective_s("all-reduce", 4096, ("x",), mesh)
    assert record.seconds == pytest.approx(together_s, rel=1e-6)
    assert together_s < 0.5 * apart_s
    assert plan.search.lower_bound <= plan.step_time <= plan.search.objective


@pytest.mark.parametrize("cluster", [Cluster.load("dgx-a100", stack="plain").part(0, 2), toy(2)])
def test_what_does_not_overlap_adds_up(cluster):
    plan = _planned(cluster)
    together = sum(c.seconds for c in plan.communication) + plan.stages[0].compute_time
    assert plan.step_time == pytest.approx(together, rel=1e-9)


@pytest.mark.parametrize(
    ("widths", "batch", "nodes"),
    [((4096, 4096, 4096, 4096), 4096, 1), ((2048, 8192, 2048), 2048, 2), ((1024, 4096, 1024, 4096), 16384, 1)],
)
def test_what_is_hidden_counts_in_the_choice(widths, batch, nodes):
    """With overlap in the objective the step is never slower, and faster where products hide gathers."""
    step, args = perceptron(*widths, batch=batch)
    problem = problem_of(step, args, Cluster.load("dgx-a100", nodes=nodes))
    without = replace(problem, policy=SearchPolicy(overlap=OverlapPolicy(link_shares=())))
    plan, summed = (strategy_named("alpa")(p) for p in (problem, without))
    assert summed.search.lower_bound <= plan.step_time <= summed.step_time
    if nodes == 1 and batch == 4096:
        assert plan.step_time < 0.985 * summed.step_time
        assert plan.search.objective > summed.search.objective


@pytest.mark.parametrize("widths", [(256, 512, 256), (256, 512, 512, 256)])
def test_no_alternative_of_an_argument_that_is_planned_again_is_faster(widths: tuple[int, ...]) -> None:
    step, args = perceptron(*widths, batch=8192)
    plan = autopar.parallelize(step, cluster=Cluster.load("dgx-a100", nodes=1), num_stages=1).plan(*args)
    assert plan.again is not None
    others = {i.path: plan.again.without(i.path) for i in plan.content.inputs}
    times = {
        path: other.step_time for path, other in others.items() if other is not None and other.step_time is not None
    }
    assert set(times) == {i.path for i in plan.content.inputs}
    assert min(times.values()) >= plan.step_time


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "most"), [("dgx-a100", (2, 4), 0.88), ("dgx-h100", (8,), 0.96)])
def test_conversions_that_compete_for_links_pay_for_them(name, mesh, most):
    """Half of a GPT's conversions could hide alone, not all at once: a share of their seconds keeps them few."""
    step, args = gpt.build("125M", abstract=True, layers=2)
    problem = problem_of(step, args, Cluster.load(name, nodes=1))
    problem = replace(problem, job=replace(problem.job, mesh_shape=mesh))
    free, priced = (
        strategy_named("alpa")(replace(problem, policy=SearchPolicy(overlap=OverlapPolicy(shares, most_ruled_out=0))))
        for shares in ((0.0,), (0.1, 0.5))
    )
    assert priced.step_time <= most * free.step_time


@given(st.lists(st.floats(0, 10), min_size=4, max_size=4), st.floats(0, 10), st.floats(0, 1))
def test_what_is_hidden_costs_its_share(costs, overlappable_s, share):
    table = np.array(costs).reshape(2, 2)
    nodes = (Node("a", np.zeros(2)), Node("b", np.zeros(2)))
    left = with_overlap(ChoiceProblem(nodes, (Edge(0, 1, table),)), {(0, 1): overlappable_s}, share).edges
    expected = np.maximum(table - overlappable_s, 0.0) + share * np.minimum(table, overlappable_s)
    np.testing.assert_allclose(left[0].costs if left else np.zeros((2, 2)), expected, atol=1e-12)


def test_conversions_overlap_while_links_are_idle():
    """A value of the first product that the third takes may hide next to the second, but for what is sent already."""
    tasks, transfers = steps("a3 b5 c2"), sends("a>b:1 a>c:2")
    timing = list_schedule(tasks, transfers)
    window = LinkIdleTime(RegionSchedule(tuple(transfers), (0, 1), timing))
    assert (timing.starts_s["b"], timing.ends_s["b"]) == (4, 9)
    assert window.idle_s("a", "c") == pytest.approx(6 - 1)  # from 3 to 9 but for the transfer to b
    assert window.idle_s("a", "b") == 0  # b waits for it: nothing runs
    assert window.idle_s("c", "a") == 0


def test_what_no_pipeline_beats_is_not_above_a_plan_on_cards():
    problem = problem_of(lambda x: jnp.exp(x - jnp.max(x, axis=1, keepdims=True)).sum(), (f32(4096, 4096),), CARD)
    assert 0 < work_bound_s(problem.graph, problem.cost_model) <= strategy_named("alpa")(problem).step_time


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "number"), [(46461, 3), (4646, 3)])
def test_no_step_waits_longer_for_its_collectives_than_with_shared_examples(seed, number):
    """Sums of a latency for each gradient leave the mesh of one axis out, on which all are sent as one."""
    case = draw(seed, number)
    assert plan_of(case).step_time <= 1.005 * plan_of(case, search="data-parallel", mesh_shape=None).step_time


def test_only_conversions_of_the_state_are_hidden_before_anything_is_scheduled():
    """Those of parameters cost the share of the first iteration, those of examples all; what is forbidden stays so."""
    step, args = mlp.build("tiny", abstract=True)
    problem = problem_of(step, args, Cluster.load("dgx-a100").part(0, 4))
    stated = build(problem, problem.cluster.logical_meshes((4,))[0])
    solved: list[ChoiceProblem] = []

    def solve(choices: ChoiceProblem, start: tuple[int, ...]) -> Solution:
        solved.append(choices)
        return Solution(Status.UNKNOWN, (), np.inf, -np.inf, 0.0, "")

    assert with_state_hidden(problem, stated, solve, 0.0) is None
    before, after = ({(e.source, e.target): e.costs for e in p.edges} for p in (stated.problem, solved[0]))
    roles = {i.name: i.role for i in problem.graph.inputs}
    shares = {"parameter": problem.policy.overlap.link_shares[0], "batch": 1.0}
    checked = set()
    for value in stated.values.values():
        role = roles.get(value.key)
        for use in value.uses if role in shares else ():
            edge = min(value.node, use.node), max(value.node, use.node)
            if edge in before and use.phase != "update":
                np.testing.assert_allclose(after[edge], shares[role] * before[edge])
                checked.add(role)
    assert checked == set(shares)
    forbidden = ChoiceProblem(solved[0].nodes[:2], (Edge(0, 1, np.full_like(_table(solved[0]), np.inf)),))
    assert np.isinf(with_overlap(forbidden, {(0, 1): np.inf}, 0.1).edges[0].costs).all()


def _table(problem: ChoiceProblem) -> NDArray[np.float64]:
    """Costs between the strategies of the first two nodes of a problem."""
    return np.zeros((len(problem.nodes[0].costs), len(problem.nodes[1].costs)))


@pytest.mark.slow
def test_a_mesh_whose_sum_is_larger_is_taken_where_its_step_is_shorter():
    """Gradients of a residual network hide and are sent as one; its sums order the meshes the other way round."""
    case = draw(20261202, 35)
    assert plan_of(case).step_time <= 1.005 * plan_of(case, mesh_shape=(8, 8)).step_time


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "number", "most"), [(70707, 34, 0.7), (70707, 5, 0.95)])
def test_answers_whose_state_is_hidden_are_a_beginning(seed, number, most):
    case = draw(seed, number)
    with mock.patch.object(overlap_objective, "with_state_hidden", lambda *_: None):
        without_s = plan_of(case).step_time
    assert plan_of(case).step_time <= most * without_s
