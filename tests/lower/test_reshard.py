"""Steps run on devices: what comes out, and which collectives are compiled."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from autopar._compat.dtypes import dtype_name
from autopar.cluster.mesh import LogicalMesh
from autopar.ir import Layout, TensorType
from autopar.lower.hlo import collectives
from autopar.lower.reshard import apply_steps, exchange
from autopar.sharding.paths import mesh_axes
from autopar.sharding.reshard import PathTables, ReshardStep, after, communication
from benchmarks.experts.compare import total_wire_bytes
from tests.sharding.pieces import Pieces, check, devices, logical_mesh, number, run, spread

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
Case = tuple[TensorType, Layout, tuple[ReshardStep, ...]]

# The programs run once: optimizing them takes longer than it saves.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tables(mesh: LogicalMesh, seed: int) -> PathTables:
    """Paths under costs drawn from ``seed``, so that many kinds of steps are cheapest somewhere."""
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

    def cost(kind: str, n: float, axes: tuple[str, ...]) -> float:
        return float(np.random.default_rng([seed, kinds.index(kind), *map(ord, axes)]).integers(1, 50))

    return PathTables(mesh, cost)


def some_paths(mesh: LogicalMesh, dtypes: list[str], count: int, seed: int) -> list[Case]:
    """Random types, layouts and paths that do something; no two ask for the same."""
    rng = np.random.default_rng([seed, *mesh.shape])
    shapes = [(8,), (16, 8), (8, 4, 8), (8, 1, 4, 8), (3, 8, 16)]
    found: dict[Case, None] = {}
    while len(found) < count:
        type = TensorType(shapes[rng.integers(len(shapes))], dtypes[len(found) % len(dtypes)])
        kinds = {"bool": ["and", "or"], "c64": ["sum"]}.get(type.dtype, ["sum", "sum", "max", "min"])
        table = tables(mesh, int(rng.integers(20)))
        nodes = table.table(type, [kinds[rng.integers(len(kinds))]]).graph.layouts
        source, target = (nodes[rng.integers(len(nodes))] for _ in range(2))
        steps = table.path(type, source, target)
        if steps:
            found[type, source, steps] = None
    return list(found)


def device_mesh(mesh: LogicalMesh) -> jax.sharding.Mesh:
    return jax.make_mesh(mesh.shape, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def stacked(microbatch_inputs: Pieces, mesh: LogicalMesh) -> np.ndarray:
    """Pieces of all devices in one array, a dim for each mesh axis in front."""
    arrays = [microbatch_inputs[at] for at in devices(mesh)]
    return np.stack(arrays).reshape(*mesh.shape, *arrays[0].shape)


def program(cases: list[Case], mesh: LogicalMesh) -> Any:
    """Runs the steps of all cases on stacked pieces."""
    lead = len(mesh.shape)

    def local(*arrays: Any) -> list[Any]:
        results = [apply_steps(c[2], a.reshape(a.shape[lead:]), mesh) for c, a in zip(cases, arrays, strict=True)]
        return [r.reshape((1,) * lead + r.shape) for r in results]

    spec = PartitionSpec(*mesh.names)
    return jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)


def values(type: TensorType, seed: int) -> np.ndarray:
    whole = np.random.default_rng(seed).integers(0, 40, type.shape)
    return whole % 2 == 0 if type.dtype == "bool" else whole.astype(jnp.dtype(_LONG[type.dtype]))


_LONG = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i32": "int32", "u32": "uint32",
    "c64": "complex64", "bool": "bool",
}  # fmt: skip


def run_and_compare(cases: list[Case], mesh: LogicalMesh) -> None:
    rng = np.random.default_rng(0)
    wholes = [values(type, i) for i, (type, _, _) in enumerate(cases)]
    before = [spread(w, source, mesh, rng) for w, (_, source, _) in zip(wholes, cases, strict=True)]
    results = jax.jit(program(cases, mesh), compiler_options=QUICK)(*(stacked(p, mesh) for p in before))
    for (type, source, steps), whole, microbatch_inputs, got in zip(cases, wholes, before, results, strict=True):
        at = source
        for step in steps:
            microbatch_inputs, at = run(step, microbatch_inputs, mesh), after(step, at, mesh)
        assert dtype_name(got.dtype) == type.dtype
        grid = np.asarray(got)
        for device, piece in microbatch_inputs.items():
            np.testing.assert_array_equal(grid[device], piece, err_msg=f"{type} {source} {steps} on {device}")
        check({device: grid[device] for device in microbatch_inputs}, whole, at, mesh)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_paths_run_as_simulated(sizes):
    mesh = logical_mesh(*sizes)
    cases = some_paths(mesh, ["f32", "i32", "bool", "f16", "bf16", "c64", "u32", "i8"], 32, 1)
    assert len({s.kind for _, _, steps in cases for s in steps}) >= 5
    run_and_compare(cases, mesh)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
def test_every_step_of_a_matrix_runs_as_simulated(sizes):
    """One step at a time, each once; among them every collective over two axes in either order."""
    mesh = logical_mesh(*sizes)
    type = TensorType((8, 16), "f32")
    graph = tables(mesh, 0).table(type).graph
    first = {step: (type, graph.layouts[i], (step,)) for step, i in zip(graph.steps, graph.sources, strict=True)}
    orders = {(s.kind, s.axes) for s in first}
    assert {("all-gather", ("x", "y")), ("all-gather", ("y", "x")), ("all-to-all", ("y", "x"))} <= orders
    assert {("reduce-scatter", ("x", "y")), ("collective-permute", ("y", "x")), ("slice", ("x", "y"))} <= orders
    run_and_compare(list(first.values()), mesh)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (2, 2)])
def test_exchange_is_a_permutation_that_makes_the_second_axis_major(sizes):
    mesh = logical_mesh(*sizes)
    pairs = exchange(*sizes)
    count = math.prod(sizes)
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(count))
    order = devices(mesh)
    for source, target in pairs:
        assert number(order[target], ("y", "x"), mesh) == source


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (2, 2)])
def test_an_exchange_moves_the_same_whichever_axis_devices_are_counted_by(sizes):
    a, b = sizes
    with_a_major, with_b_major = list(np.ndindex(a, b)), [(i, j) for j in range(b) for i in range(a)]
    moves = {(with_a_major[source], with_a_major[target]) for source, target in exchange(a, b)}
    turned = exchange(a, b, transposed=True)
    assert {(with_b_major[source], with_b_major[target]) for source, target in turned} == moves


def test_keys_are_moved_as_they_are():
    mesh = logical_mesh(2, 4)
    keys = jax.random.split(jax.random.key(3), 8)
    step = ReshardStep("all-gather", ("x", "y"), 0)
    spec = PartitionSpec(("x", "y"))

    def whole(k: Any) -> Any:
        return apply_steps((step,), k, mesh)

    gathered = jax.jit(jax.shard_map(whole, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False))
    got = jax.random.key_data(gathered(keys)).reshape(8, 8, 2)
    assert (np.asarray(got) == np.asarray(jax.random.key_data(keys))).all()


def test_empty_arrays_change_shape_and_send_nothing():
    mesh = logical_mesh(2, 4)
    type, source = TensorType((0, 8, 8), "f32"), Layout.parse("[.,y,.]+sum(x)")
    target = Layout.parse("[.,.,y]")
    steps = (ReshardStep("all-to-all", ("y",), 1, 2), ReshardStep("all-reduce", ("x",)))
    assert after(steps[1], after(steps[0], source, mesh), mesh) == target
    run_and_compare([(type, source, steps)], mesh)
    array = np.zeros((*mesh.shape, *source.local_shape(type.shape, mesh.sizes)), np.float32)
    text = jax.jit(program([(type, source, steps)], mesh)).lower(array).compile().as_text()
    assert collectives(text) == ()


def test_no_steps_leave_the_array_alone():
    array = np.ones(3)
    assert apply_steps((), array, logical_mesh(8)) is array


def test_unknown_steps_are_refused():
    with pytest.raises(ValueError, match="no step is called 'broadcast'"):
        apply_steps((ReshardStep("broadcast", ("x",)),), jnp.ones(3), logical_mesh(8))


def predicted(cases: list[Case], mesh: LogicalMesh) -> list[tuple[str, str, int, int]]:
    """(kind, dtype, full bytes, devices of a group) of every collective, sorted."""
    found = []
    for type, source, steps in cases:
        at = source
        for step in steps:
            for kind, full_bytes, axes in communication(step, type, at, mesh):
                # A permutation has pairs, not groups. Bool is reduced as bytes, complex numbers as pairs of real ones.
                size = 2 if kind == "collective-permute" else mesh.group_size(axes)
                reduced = {("bool", "all-reduce"): "u8", ("c64", "all-reduce"): "f32", ("c64", "reduce-scatter"): "f32"}
                dtype = reduced.get((type.dtype, kind), type.dtype)
                found.append((kind, dtype, full_bytes, size))
            at = after(step, at, mesh)
    return sorted(found)


def compiled(function: Any, cases: list[Case], mesh: LogicalMesh) -> str:
    shapes = [(*mesh.shape, *source.local_shape(type.shape, mesh.sizes)) for type, source, _ in cases]
    dtypes = [jnp.dtype(_LONG[type.dtype]) for type, _, _ in cases]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    text: str = jax.jit(function).lower(*arrays).compile(compiler_options=QUICK).as_text()
    return text


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_compiled_collectives_are_the_predicted_ones(sizes):
    mesh = logical_mesh(*sizes)
    assert mesh_axes(mesh) == mesh.axes
    cases = some_paths(mesh, ["f32", "i32", "c64", "f16", "bool"], 20, 2)
    found = collectives(compiled(program(cases, mesh), cases, mesh))
    assert sorted((c.kind, c.dtype, c.full_bytes, c.group_size) for c in found) == predicted(cases, mesh)
    assert all(c.times == 1 and c.exact for c in found)
    assert len({c.kind for c in found}) >= 3


def test_collectives_in_loops_are_counted_by_trips():
    mesh = logical_mesh(2, 4)
    type, source = TensorType((16, 8), "f32"), Layout.parse("[x,.]")
    there = (ReshardStep("all-gather", ("x",), 0), ReshardStep("slice", ("y",), 1))
    back = (
        ReshardStep("all-to-all", ("y",), 1, 0),
        ReshardStep("all-gather", ("y",), 0),
        ReshardStep("slice", ("x",), 0),
    )
    lead = len(mesh.shape)

    def local(a: Any) -> Any:
        def inner(c: Any, _: None) -> tuple[Any, None]:
            return apply_steps(back, apply_steps(there, c, mesh) * 2, mesh) + 1, None

        def outer(c: Any, _: None) -> tuple[Any, None]:
            return lax.scan(inner, lax.psum(c, "y"), None, length=3)[0], None

        return lax.scan(outer, a.reshape(a.shape[lead:]), None, length=5)[0].reshape(a.shape)

    spec = PartitionSpec(*mesh.names)
    function = jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
    cases = [(type, source, (*there, *back))]
    found = collectives(compiled(function, cases, mesh))
    once = {("all-reduce", "f32", 256, 4, 5.0)}
    assert {(c.kind, c.dtype, c.full_bytes, c.group_size, c.times) for c in found} == once | {
        (*p, 15.0) for p in predicted(cases, mesh)
    }
    assert all(c.exact for c in found)
    sent = 5 * 2 * 3 / 4 * 256 + 15 * (1 / 2 * 512 + 3 / 4 * 128 + 3 / 4 * 512)
    assert total_wire_bytes(found) == pytest.approx(sent)


def test_a_loop_without_known_trips_is_marked():
    mesh = logical_mesh(8)

    def local(a: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 100.0, lambda c: lax.psum(c, "x"), a)

    spec = PartitionSpec("x")
    function = jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(function).lower(jnp.ones(16)).compile().as_text()
    (once,), (often,) = collectives(text), collectives(text, unknown_trips=7)
    assert (once.times, often.times) == (1, 7)
    assert not once.exact


def test_branches_share_one_run():
    mesh = logical_mesh(8)

    def local(a: Any) -> Any:
        return lax.cond(a.sum() > 0, lambda c: lax.psum(c, "x"), lambda c: lax.pmax(c * 2, "x"), a)

    spec = PartitionSpec("x")
    function = jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
    found = collectives(jax.jit(function).lower(jnp.ones(16)).compile().as_text())
    assert [(c.kind, c.times, c.exact) for c in found] == [("all-reduce", 0.5, False)] * 2
