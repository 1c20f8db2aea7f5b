"""Paths between layouts: right by simulation, cheapest by brute force, the same in every table."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.cluster.mesh import LogicalMesh
from autopar.errors import AutoparError
from autopar.ir import Layout, TensorType
from autopar.sharding.paths import bare
from autopar.sharding.reshard import PathTables, ReshardStep, after, communication
from tests.sharding.pieces import check, logical_mesh, run, spread

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "slice", "mask")
MESHES = ((8,), (2, 4), (4, 2), (2, 2), (3, 2), (1, 4), (2, 2, 2), (2, 1, 3))
NUMPY = {"f32": np.float32, "i32": np.int32, "bool": np.bool_, "c64": np.complex64}
P = Layout.parse


class Cost:
    """Seconds that grow with bytes, different for every kind and set of axes; all drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, kind: str, full_bytes: float, axes: tuple[str, ...]) -> float:
        rng = np.random.default_rng([self.seed, KINDS.index(kind), *map(ord, axes)])
        alpha, beta = rng.integers(1, 9, 2)
        return float(alpha + beta * full_bytes / 64)


def tables(mesh: LogicalMesh, seed: int = 0) -> PathTables:
    return PathTables(mesh, Cost(seed), lambda n: 0.01)


@st.composite
def layouts(draw: st.DrawFn, type: TensorType, mesh: LogicalMesh) -> Layout:
    """Any layout of ``type``; axes of a dim in any order."""
    kinds = {"bool": ["and", "or", "max"], "c64": ["sum"]}.get(type.dtype, ["sum", "sum", "max", "min"])
    dims: list[list[str]] = [[] for _ in type.shape]
    partial = []
    for axis, n in mesh.axes:
        fitting = [d for d, dim in enumerate(dims) if type.shape[d] % (math.prod(mesh.sizes[a] for a in dim) * n) == 0]
        place = draw(st.sampled_from(["whole", "partial", *fitting]))
        if isinstance(place, int):
            dims[place].insert(draw(st.integers(0, len(dims[place]))), axis)
        elif place == "partial":
            partial.append(axis)
    return Layout(tuple(map(tuple, dims)), tuple(partial), draw(st.sampled_from(kinds)) if partial else "sum")


@st.composite
def types(draw: st.DrawFn, max_rank: int = 4) -> TensorType:
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 8, 12, 16])
    rank = draw(st.integers(0, max_rank))
    return TensorType(tuple(draw(st.lists(sizes, min_size=rank, max_size=rank))), draw(st.sampled_from(sorted(NUMPY))))


@st.composite
def cases(draw: st.DrawFn, max_rank: int = 4, ends: int = 2) -> tuple[LogicalMesh, TensorType, list[Layout]]:
    mesh = logical_mesh(*draw(st.sampled_from(MESHES)))
    type = draw(types(max_rank))
    return mesh, type, [draw(layouts(type, mesh)) for _ in range(ends)]


def priced(table: PathTables, type: TensorType, source: Layout, steps: tuple[ReshardStep, ...]) -> float:
    """Seconds of ``steps``, added up here."""
    total, at = 0.0, bare(source, table.mesh)
    for step in steps:
        records = communication(step, type, at, table.mesh)
        total += sum(table.cost(*record) for record in records) if records else table.local(0)
        at = after(step, at, table.mesh)
    return total


@given(cases(), st.integers(0, 9))
@settings(max_examples=150)
def test_steps_make_the_pieces_of_the_target(case, seed):
    mesh, type, (source, target) = case
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 50, type.shape)
    whole = (whole % 2 == 0) if type.dtype == "bool" else whole.astype(NUMPY[type.dtype])
    pieces, at = spread(whole, source, mesh, rng), bare(source, mesh)
    for step in tables(mesh, seed).path(type, source, target):
        pieces, at = run(step, pieces, mesh), after(step, at, mesh)
        assert at.fits(type.shape, mesh.sizes)
        check(pieces, whole, at, mesh)
    assert at == bare(target, mesh)
    check(pieces, whole, target, mesh)


def legal(at: Layout, type: TensorType, mesh: LogicalMesh, reductions: set[str]) -> list[ReshardStep]:
    """Every step that the definitions allow, found by trying all there could be."""
    sizes = {a: n for a, n in mesh.axes if n > 1}
    dims = range(type.rank)
    found = []
    used = {*at.axes, *at.partial}
    for k in range(1, len(sizes) + 1):
        for axes in itertools.permutations(sizes, k):
            free, ordered = not used & set(axes), list(axes) == [a for a in sizes if a in axes]
            if set(axes) <= set(at.partial) and ordered:
                found.append(ReshardStep("all-reduce", axes, reduce=at.reduce))
                found += [ReshardStep("reduce-scatter", axes, d) for d in dims if at.reduce == "sum"]
            for d in dims:
                if at.dims[d][-k:] == axes:
                    found.append(ReshardStep("all-gather", axes, d))
                    found += [ReshardStep("all-to-all", axes, d, to) for to in dims if to != d]
                if k == 2 and axes in itertools.pairwise(at.dims[d]):
                    found.append(ReshardStep("collective-permute", axes, d))
            found += [ReshardStep("slice", axes, d) for d in dims if free and ordered]
            if k == 2 and sizes[axes[0]] == sizes[axes[1]] and ordered:
                found.append(ReshardStep("collective-permute", axes))
            kinds = [at.reduce] if at.partial else sorted(reductions)
            found += [ReshardStep("mask", axes, reduce=kind) for kind in kinds if free and ordered]
    return [s for s in found if after(s, at, mesh).fits(type.shape, mesh.sizes)]


@given(cases(max_rank=2).filter(lambda c: len([n for n in c[0].shape if n > 1]) <= 2), st.integers(0, 30))
@settings(max_examples=80)
@example((logical_mesh(2, 2), TensorType((4, 4), "f32"), [P("[x,y]"), P("[y,x]")]), 0)
@example((logical_mesh(2, 4), TensorType((8, 8), "f32"), [P("[y+x,.]"), P("[x+y,.]")]), 0)
def test_no_four_steps_are_cheaper(case, seed):
    mesh, type, (source, target) = case
    table = tables(mesh, seed)
    start, end = bare(source, mesh), bare(target, mesh)
    reductions = {k.reduce for k in (start, end) if k.partial} | ({"sum"} if type.dtype != "bool" else set())
    best: dict[Layout, tuple[float, int]] = {start: (0.0, 0)}
    for _ in range(4):
        reached = dict(best)
        for at, (seconds, count) in best.items():
            for step in legal(at, type, mesh, reductions):
                to = after(step, at, mesh)
                offer = (round(seconds + priced(table, type, at, (step,)), 9), count + 1)
                reached[to] = min(offer, reached.get(to, (math.inf, 0)))
        best = reached
    path = table.path(type, source, target)
    mine = priced(table, type, source, path)
    assert mine == pytest.approx(table.seconds(type, source, target), rel=1e-9, abs=1e-9)
    least, count = best.get(end, (math.inf, 0))
    assert mine <= least + 1e-6
    if len(path) <= 4:
        assert mine >= least - 1e-6
        assert len(path) == count


@given(cases(ends=6), st.integers(0, 9))
@settings(max_examples=50)
def test_the_matrix_is_the_cost_of_the_paths(case, seed):
    mesh, type, ends = case
    table, other = tables(mesh, seed), tables(mesh, seed)
    matrix = table.cost_matrix(type, ends[:4], ends[2:])
    assert matrix.shape == (4, 4)
    for (i, source), (j, target) in itertools.product(enumerate(ends[:4]), enumerate(ends[2:])):
        steps = other.path(type, source, target)
        want = priced(table, type, source, steps)
        assert matrix[i, j] == pytest.approx(want, rel=1e-9, abs=1e-9)
        assert table.seconds(type, source, target) == pytest.approx(want, rel=1e-9, abs=1e-9)


@given(cases(max_rank=3, ends=5), st.integers(0, 9))
@settings(max_examples=80)
def test_a_detour_is_never_cheaper(case, seed):
    mesh, type, ends = case
    d = tables(mesh, seed).cost_matrix(type, ends, ends)
    assert (d[:, None, :] <= d[:, :, None] + d[None, :, :] + 1e-9).all()
    assert not np.diagonal(d).any()


@given(cases(), st.integers(0, 9))
@settings(max_examples=60)
def test_paths_do_not_depend_on_what_was_asked_before(case, seed):
    mesh, type, (source, target) = case
    fresh, used = tables(mesh, seed), tables(mesh, seed)
    used.cost_matrix(type, [target, source], [source])
    used.path(type, target, source)
    assert fresh.path(type, source, target) == used.path(type, source, target)


def test_of_equally_fast_paths_the_shortest_is_taken():
    mesh = logical_mesh(2, 2, 2)
    free = PathTables(mesh, lambda kind, n, axes: 0.0, lambda n: 0.0)
    type = TensorType((8, 8), "f32")
    assert free.path(type, P("[.,.]+sum(x,y,z)"), P("[.,.]")) == (ReshardStep("all-reduce", ("x", "y", "z")),)
    assert free.path(type, P("[.,.]"), P("[x+y+z,.]")) == (ReshardStep("slice", ("x", "y", "z"), 0),)
    assert free.path(type, P("[x+y,.]"), P("[.,x+y]")) == (ReshardStep("all-to-all", ("x", "y"), 0, 1),)
    assert free.path(type, P("[x,.]+sum(y,z)"), P("[x+y+z,.]")) == (ReshardStep("reduce-scatter", ("y", "z"), 0),)
    assert free.path(type, P("[x,.]"), P("[.,.]")) == (ReshardStep("all-gather", ("x",), 0),)
    assert free.path(type, P("[x,.]"), P("[x,.]")) == ()


def test_a_slow_axis_is_crossed_with_a_part_of_the_data():
    mesh = logical_mesh(2, 4)
    slow = {("x",): 100.0, ("y",): 1.0, ("x", "y"): 100.0}
    table = PathTables(mesh, lambda kind, n, axes: slow[axes] * n * (2 if kind == "all-reduce" else 1))
    steps = table.path(TensorType((64, 64), "f32"), P("[.,.]+sum(x,y)"), P("[.,.]"))
    assert [(s.kind, s.axes) for s in steps] == [
        ("reduce-scatter", ("y",)),
        ("all-reduce", ("x",)),
        ("all-gather", ("y",)),
    ]


def test_what_is_sent_is_recorded_as_one_group_sees_it():
    mesh = logical_mesh(2, 4)
    type = TensorType((8, 16), "f32")  # 512 bytes
    said = {
        ReshardStep("all-reduce", ("x",)): (P("[y,.]+sum(x)"), ("all-reduce", 128, ("x",))),
        ReshardStep("reduce-scatter", ("x", "y"), 1): (P("[.,.]+sum(x,y)"), ("reduce-scatter", 512, ("x", "y"))),
        ReshardStep("all-gather", ("y",), 0): (P("[x+y,.]"), ("all-gather", 256, ("y",))),
        ReshardStep("all-gather", ("y", "x"), 0): (P("[y+x,.]"), ("all-gather", 512, ("x", "y"))),
        ReshardStep("all-to-all", ("y",), 0, 1): (P("[y,x]"), ("all-to-all", 256, ("y",))),
        ReshardStep("collective-permute", ("x", "y"), 0): (P("[x+y,.]"), ("collective-permute", 64, ("x", "y"))),
        ReshardStep("slice", ("x",), 0): (P("[.,.]"), ()),
        ReshardStep("mask", ("x",)): (P("[.,.]"), ()),
    }
    assert {s: communication(s, type, before, mesh) for s, (before, _) in said.items()} == {
        s: (want,) if want else () for s, (_, want) in said.items()
    }
    assert communication(ReshardStep("all-reduce", ("x",)), TensorType((0, 8), "f32"), P("[.,.]+sum(x)"), mesh) == ()


@given(cases(), st.integers(0, 9))
@settings(max_examples=60)
def test_communication_lists_the_collectives_of_the_path(case, seed):
    mesh, type, (source, target) = case
    table = replace(tables(mesh, seed), rearrange=lambda n: 1e-3 * n)
    steps = [s for s in table.path(type, source, target) if not s.is_local]
    records = table.communication(type, source, target)
    assert [(r.kind, sorted(r.axes)) for r in records] == [(s.kind, sorted(s.axes)) for s in steps]
    local = len(table.path(type, source, target)) - len(steps)
    total = sum(r.seconds for r in records) + 0.01 * local
    assert total == pytest.approx(table.seconds(type, source, target), rel=1e-9, abs=1e-9)


def test_types_of_one_size_and_divisibility_share_a_table():
    table = tables(logical_mesh(2, 4))
    assert table.table(TensorType((64, 8), "f32")) is table.table(TensorType((16, 32), "i32"))
    assert table.table(TensorType((64, 8), "f32")) is not table.table(TensorType((64, 16), "f32"))
    assert table.table(TensorType((64, 8), "f32")).graph is table.table(TensorType((64, 16), "f32")).graph
    assert table.table(TensorType((64, 6), "f32")).graph is not table.table(TensorType((64, 8), "f32")).graph


def test_axes_of_one_device_take_no_steps():
    table = tables(logical_mesh(1, 4))
    type = TensorType((8, 8), "f32")
    assert table.path(type, P("[x,.]+sum(y)"), P("[.,x]+sum(y)")) == ()
    assert table.path(type, P("[.,.]+max(x)"), P("[.,.]")) == ()
    assert table.path(type, P("[x+y,.]"), P("[.,.]")) == (ReshardStep("all-gather", ("y",), 0),)


@pytest.mark.parametrize("dtype", ["bool", "key<fry>", "token"])
def test_what_cannot_be_added_is_never_a_partial_sum(dtype):
    table = tables(logical_mesh(2, 4))
    type = TensorType((8,), dtype)
    assert table.seconds(type, P("[.]"), P("[.]+sum(x)")) == math.inf
    assert not any(k.partial and k.reduce == "sum" for k in table.table(type).graph.layouts)
    with pytest.raises(AutoparError, match=r"cannot go from \[\.\] to \[\.\]\+sum\(x\)"):
        table.path(type, P("[.]"), P("[.]+sum(x)"))


def test_bitwise_reductions_of_integers_have_no_collective():
    table = tables(logical_mesh(2, 4))
    assert table.seconds(TensorType((8,), "i32"), P("[.]+and(x)"), P("[.]")) == math.inf
    steps = table.path(TensorType((8,), "bool"), P("[.]+and(x)"), P("[.]"))
    assert steps == (ReshardStep("all-reduce", ("x",), reduce="and"),)


def test_layouts_that_do_not_fit_cannot_be_reached():
    table = tables(logical_mesh(2, 4))
    type = TensorType((8, 6), "f32")
    found = table.cost_matrix(type, [P("[.,.]"), P("[.,y]")], [P("[.,x]"), P("[.,y]")])
    assert np.isinf(found).tolist() == [[False, True], [True, False]]
    assert found[1, 1] == 0
    with pytest.raises(AutoparError, match="do not divide"):
        table.path(type, P("[.,.]"), P("[.,y]"))


@pytest.mark.parametrize("dtype", ["f32", "key<fry>", "bool", "u2"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (1, 1)])
def test_small_and_empty_tensors_stay_whole(shape, dtype):
    table = tables(logical_mesh(2, 4))
    whole = Layout.replicated(len(shape))
    assert table.path(TensorType(shape, dtype), whole, whole) == ()
    assert table.cost_matrix(TensorType(shape, dtype), [whole], [whole]).tolist() == [[0.0]]


def test_one_device_has_one_layout():
    table = tables(LogicalMesh((), ()))
    assert table.cost_matrix(TensorType((4,), "f32"), [P("[.]")], [P("[.]")]).tolist() == [[0.0]]


def test_steps_of_infinite_cost_are_not_taken():
    mesh = logical_mesh(8)
    table = PathTables(mesh, lambda kind, n, axes: math.inf if kind == "all-to-all" else 1.0)
    steps = table.path(TensorType((8, 8), "f32"), P("[x,.]"), P("[.,x]"))
    assert [s.kind for s in steps] == ["all-gather", "slice"]
    nothing = PathTables(mesh, lambda kind, n, axes: math.inf)
    assert nothing.seconds(TensorType((8,), "f32"), P("[x]"), P("[.]")) == math.inf


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_impossible_costs_are_refused(seconds):
    table = PathTables(logical_mesh(8), lambda kind, n, axes: seconds)
    with pytest.raises(ValueError, match="must be 0 or more"):
        table.seconds(TensorType((8,), "f32"), P("[x]"), P("[.]"))


def test_layouts_of_another_rank_are_refused():
    with pytest.raises(ValueError, match="which has 2 dims"):
        tables(logical_mesh(8)).path(TensorType((8, 8), "f32"), P("[x]"), P("[.]"))


def test_unknown_steps_are_refused():
    with pytest.raises(ValueError, match="no step is called 'broadcast'"):
        after(ReshardStep("broadcast", ("x",)), P("[.]"), logical_mesh(8))
