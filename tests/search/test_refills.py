"""Seconds that devices lose by waiting for each other: one price in the statement, in the plan and of each message."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.ir import TensorType
from autopar.search import Problem
from autopar.search.intra import build
from autopar.search.intra.collectives import PricedCollective, seconds_as_one
from autopar.search.intra.edges import edges
from autopar.search.intra.extract import extract
from autopar.search.intra.layouts import LayoutTable
from autopar.search.intra.sharding_problem import Use
from autopar.search.resharding import path_tables
from autopar.solver import solve
from benchmarks.spatial import chain
from examples import mlp
from tests.search.problems import problem_of, toy

#: Bytes/s at which caches are filled again, and bytes of them.
BANDWIDTH, BYTES = 1e8, 2.0**14


def refilling(cluster: Cluster) -> Cluster:
    """The cluster with devices that lose what is in their caches while they wait."""
    (group,) = cluster.groups
    return replace(
        cluster, groups=(replace(group, intra=replace(group.intra, refill_bandwidth=BANDWIDTH, refill_bytes=BYTES)),)
    )


def problems(name: str) -> tuple[Problem, Problem]:
    """The problem of a program on devices that lose nothing, and on such that do."""
    program: Any = mlp.build(layers=2) if name == "mlp" else chain(1, 8, 32, layers=2)
    step, args = program
    plain = toy(8, bandwidth=1e10, flops=1e11)
    return problem_of(step, args, plain), problem_of(step, args, refilling(plain))


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("name", ["mlp", "chain"])
def test_the_statement_has_the_price_of_the_plan(name: str, shape: tuple[int, ...]) -> None:
    """Of the best choice: readers may share what each was charged for, so the statement may say a little more."""
    for problem in problems(name):
        (mesh,) = problem.cluster.logical_meshes(shape)
        statement = build(problem, mesh)
        solution = solve(statement.problem)
        planned = extract(problem, statement, solution.choice)
        assert 0.99 * solution.objective <= planned.step_s <= solution.objective * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("wire", ["", "int8/32"])
def test_a_conversion_loses_once_what_a_device_holds_of_the_value(shape: tuple[int, ...], wire: str) -> None:
    """Between any two layouts, if the path between them sends anything, however many collectives it has."""
    plain, lossy = problems("mlp")
    (mesh,) = plain.cluster.logical_meshes(shape)
    tables = [LayoutTable(mesh, CostModel(p.cluster)).sending(wire) for p in (plain, lossy)]
    paths = path_tables(mesh, CostModel(plain.cluster)).sending(wire)
    for type in (TensorType((8, 16), "f32"), TensorType((64, 128, 8), "f32")):
        layouts = tables[0].all(type, partial=True)
        without_s, with_s = (table.resharding(type, layouts, layouts, 2.0) for table in tables)
        for (i, source), (j, target) in product(enumerate(layouts), repeat=2):
            if without_s[i, j] == np.inf:
                assert with_s[i, j] == np.inf
                continue
            held_bytes = source.local_bytes(type, mesh.sizes)
            lost_s = min(BYTES, held_bytes) / BANDWIDTH if paths.communication(type, source, target) else 0.0
            assert with_s[i, j] == pytest.approx(without_s[i, j] + 2 * lost_s)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("name", ["mlp", "chain"])
def test_of_one_choice_collectives_alone_take_longer(name: str, shape: tuple[int, ...]) -> None:
    """Of the best choice: the same ones are sent, each loses a refill of all caches at most, and some lose some."""
    plain, lossy = problems(name)
    statements = [build(p, p.cluster.logical_meshes(shape)[0]) for p in (plain, lossy)]
    choice = solve(statements[1].problem).choice
    here, there = (extract(p, s, choice) for p, s in zip((plain, lossy), statements, strict=True))
    assert there.compute_s == here.compute_s
    before, after = ({(c.kind, c.bytes, c.axis): c for c in s.communication} for s in (here, there))
    assert before.keys() == after.keys() and before
    lost_s = [after[key].seconds - c.seconds for key, c in before.items()]
    most_s = [c.count * BYTES / BANDWIDTH for c in before.values()]
    assert all(-1e-12 <= s <= most * (1 + 1e-9) for s, most in zip(lost_s, most_s, strict=True)) and sum(lost_s) > 0


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_edges_of_shards_lose_once_what_a_device_holds_of_the_operand(shape: tuple[int, ...]) -> None:
    """However many neighbours send some; by strategy of each convolution and its gradients."""
    problem, lossy = problems("chain")
    (mesh,) = problem.cluster.logical_meshes(shape)
    with_edges = 0
    for site in build(problem, mesh).sites:
        for strategy in site.strategies:
            plain, longer = (list(edges(p.cost_model, mesh, strategy, site.op, site.types)) for p in (problem, lossy))
            assert [(m.operand, m.bytes, m.axes) for m in plain] == [(m.operand, m.bytes, m.axes) for m in longer]
            sent = {m.operand for m in plain if m.bytes}
            held_bytes = [strategy.operand_layouts[n].local_bytes(site.types[n], mesh.sizes) for n in sent]
            lost_s = sum(m.seconds for m in longer) - sum(m.seconds for m in plain)
            assert lost_s == pytest.approx(sum(min(BYTES, held) for held in held_bytes) / BANDWIDTH)
            with_edges += bool(sent)
    assert with_edges


def test_small_pieces_are_sent_where_a_constant_would_repeat_all_work() -> None:
    """Devices lose as much before each message only where they hold as much."""
    step, args = chain(1, 8, 32, layers=2)
    slow = toy(8, bandwidth=1e10, flops=1e10)
    constant = toy(8, bandwidth=1e10, flops=1e10, latency_s=BYTES / BANDWIDTH)
    sent = []
    for cluster in (slow, refilling(slow), constant):
        problem = problem_of(step, args, cluster)
        statement = build(problem, cluster.logical_meshes((8,))[0])
        planned = extract(problem, statement, solve(statement.problem).choice)
        sent.append(sum(c.count for c in planned.communication))
    assert sent[0] > 0 and sent[1] > 0 and sent[2] == 0


def test_clusters_that_lose_nothing_do_not_name_it() -> None:
    assert "refill" not in toy(8).to_json()
    assert "refill_bytes" in refilling(toy(8)).to_json()


def test_what_is_sent_as_one_loses_the_most_of_it_once_a_message() -> None:
    """Messages of up to 300 bytes of three collectives, twice a step: the first two go together."""
    plain, _ = problems("mlp")
    (mesh,) = plain.cluster.logical_meshes((8,))
    cost, use = CostModel(plain.cluster), Use(0, (), 2.0, 0, "op", "update")
    some = [
        PricedCollective("all-reduce", "v", n, "x", use, 2.0, 1.0, lost_s=s)
        for n, s in ((100, 0.5), (200, 3.0), (250, 1.0))
    ]
    as_one, in_two = (seconds_as_one(cost, mesh, some, most) for most in (float("inf"), 300.0))
    assert as_one == pytest.approx(3.0 + 2 * cost.collective_s("all-reduce", 550.0, ("x",), mesh))
    each_s = [cost.collective_s("all-reduce", bytes, ("x",), mesh) for bytes in (300.0, 250.0)]
    assert in_two == pytest.approx(2 * 3.0 + 2 * sum(each_s))
