"""On a torus gathers and scatters go along one axis at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.cluster import Cluster, LinkSpec
from autopar.cost import CostModel
from autopar.ir import Layout, TensorType
from autopar.search.resharding import path_tables
from autopar.sharding.reshard import PathTables, ReshardStep, after
from tests.search.problems import toy

TYPE = TensorType((64, 128), "f32")


def tables(cluster: str) -> PathTables:
    nodes = 8 // Cluster.load(cluster).groups[0].devices_per_node
    loaded = Cluster.load(cluster, nodes)
    (mesh,) = loaded.logical_meshes((2, 4))
    return path_tables(mesh, CostModel(loaded))


def joint(steps: tuple[ReshardStep, ...]) -> list[ReshardStep]:
    return [s for s in steps if s.kind in ("all-gather", "reduce-scatter") and len(s.axes) > 1]


@pytest.mark.parametrize("cluster", ["tpu-v5p", "tpu-v5e"])
def test_no_path_gathers_or_scatters_along_two_axes_at_once(cluster: str) -> None:
    found = tables(cluster)
    layouts = found.table(TYPE).graph.layouts
    for source, target in itertools.product(layouts, layouts):
        steps = found.path(TYPE, source, target)
        assert not joint(steps)
        at = source
        for step in steps:
            at = after(step, at, found.mesh)
        assert at == target


def test_the_innermost_axis_is_gathered_first() -> None:
    whole, split = Layout.replicated(2), Layout((("x", "y"), ()))
    assert [s.axes for s in tables("tpu-v5p").path(TYPE, split, whole)] == [("y",), ("x",)]


def test_the_outermost_axis_is_scattered_first() -> None:
    found = tables("tpu-v5p")
    steps = found.path(TYPE, Layout(((), ()), ("x", "y")), Layout((("x", "y"), ())))
    assert [(s.kind, s.axes) for s in steps] == [("reduce-scatter", ("x",)), ("reduce-scatter", ("y",))]


def test_sums_over_two_levels_of_links_go_level_by_level_where_that_is_cheaper() -> None:
    """Scattered inside a node, summed across, gathered inside; or one collective, whose price has both levels."""

    def kinds(cluster: Cluster, shape: tuple[int, int], rows: int) -> list[tuple[str, tuple[str, ...]]]:
        (mesh,) = cluster.logical_meshes(shape)
        every, one = Layout(((), ()), mesh.names), Layout.replicated(2)
        steps = path_tables(mesh, CostModel(cluster)).path(TensorType((rows, 1024), "f32"), every, one)
        return [(s.kind, s.axes) for s in steps]

    levels = [("reduce-scatter", ("y",)), ("all-reduce", ("x",)), ("all-gather", ("y",))]
    slow = toy(8, nodes=2, bandwidth=9e10, latency_s=1e-6)
    (nodes,) = slow.groups
    slow = replace(slow, groups=(replace(nodes, inter=LinkSpec(nodes.intra.bandwidth / 15, 2e-5)),))
    assert kinds(slow, (2, 4), 1 << 14) == levels
    assert kinds(Cluster.load("dgx-h100", 2), (2, 8), 1 << 10) == levels
    assert kinds(Cluster.load("dgx-h100", 2), (2, 8), 1 << 14) == [("all-reduce", ("x", "y"))]
