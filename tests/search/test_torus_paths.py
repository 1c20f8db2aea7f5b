"""On a torus gathers and scatters go along one axis at a time."""

from __future__ import annotations

import itertools

import pytest

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.ir import Layout, TensorType
from autopar.search.resharding import path_tables
from autopar.sharding.reshard import PathTables, ReshardStep, after

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
