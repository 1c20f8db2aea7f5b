"""Sends of equal stages: the narrowest cuts, the links that they cross, and what schedules hide of them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.schedule import chain, get
from autopar.search.enumeration.sends import StageSends, narrowest_cuts, sends_of
from autopar.search.policy import SearchPolicy
from autopar.simulate import equal_stages, step_of
from examples import gpt
from tests.search.problems import f32, graph_of, momentum, problem_of

POLICY = SearchPolicy().schedules
SCHEDULES = ("1f1b", *POLICY.one_stage_per_worker)


def nodes(count: int, devices: int, inter: float = 1e6) -> Cluster:
    device = Device("toy", 10**9, 1e9, (("f32", 1e8),))
    return Cluster("toy", (NodeGroup(count, devices, device, LinkSpec(1e9, 1e-6), LinkSpec(inter, 1e-5)),))


def net(*widths: int) -> tuple[Any, Any]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    return momentum(loss, [f32(*shape) for shape in itertools.pairwise(widths)], f32(16, widths[0]))


def test_stages_are_cut_where_the_fewest_bytes_are_alive() -> None:
    wide, narrow = (graph_of(fn, *args) for fn, args in (net(64, 64, 64, 64, 64), net(64, 64, 8, 64, 64)))
    assert narrowest_cuts(wide, 2) == [4 * 16 * 64]
    assert narrowest_cuts(narrow, 2) == [4 * 16 * 8]
    assert narrowest_cuts(wide, 4) == [4 * 16 * 64] * 3


def test_loops_over_layers_are_cut_between_their_trips() -> None:
    cuts = []
    for scan in (False, True):
        fn, args = gpt.build("tiny", abstract=True, layers=4, scan=scan)
        cuts.append(narrowest_cuts(graph_of(fn, *args), 4))
    assert cuts[0] == cuts[1]


def test_a_cut_between_nodes_takes_the_link_between_them() -> None:
    fn, args = net(64, 64, 64, 64, 64)
    inside, across, both = (
        sends_of(problem_of(fn, args, cluster), stages).cuts
        for cluster, stages in ((nodes(1, 2), 2), (nodes(2, 1), 2), (nodes(2, 2), 4))
    )
    assert inside == (pytest.approx((1e-6, 4096 / 1e9)),)
    assert across == (pytest.approx((1e-5, 4096 / 1e6)),)
    assert both == (*inside, *across, *inside)
    lanes = sends_of(problem_of(fn, args, nodes(2, 4)), 2).cuts
    assert lanes == (pytest.approx((1e-5, 1024 / 1e6)),), "each of four devices sends a quarter"


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("transfer_s", [0, 1, 3, 9])
@pytest.mark.parametrize("count", [1, 2, 8, 24])
def test_schedules_of_equal_stages_take_no_less_and_the_best_hardly_more(
    stages: int, transfer_s: int, count: int
) -> None:
    sends, times = StageSends(stages, ((transfer_s, 0.0),) * (stages - 1)), list[float]()
    for name in SCHEDULES:
        table = get(name).table(stages, count)
        passes = {"forward": 1, "backward": 1 if table.splits_backward else 2, "weight": 1}
        flow = chain(table)
        times.append(float(step_of(table, flow, equal_stages(table, flow, passes, transfer_s)).seconds))  # type: ignore[arg-type]
    least_s, usual_s = (sends.filled_s(count, 3 * count, POLICY.bubble_left, least) for least in (1.0, 0.0))
    assert least_s <= 1.03 * min(times)
    assert min(times) <= 1.5 * usual_s


def test_without_a_backward_pass_nothing_is_sent_back() -> None:
    sends = StageSends(2, ((1.0, 0.0),), trains=False)
    assert sends.step_s(4, 4.0, 1.0) == 6.0
