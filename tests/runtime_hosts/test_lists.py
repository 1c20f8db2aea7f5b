"""Lists whose values go between workers by programs of both, on this process's devices: the bits of the plain lists."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import autopar
from autopar import Plan
from autopar.lower.hosted import PINNED_HOST
from autopar.runtime.pipeline import PipelineProgram, load_pipeline
from autopar.runtime.without_flush import load_stale
from examples import gpt, mlp
from tests.end_to_end.towers import Towers
from tests.runtime_hosts.test_one_program import batch, by_hand, data, layers, stacked, state, tied, train, with_keys


def loaded(fn: Any, args: Any, by_hand: bool = False, **options: Any) -> tuple[PipelineProgram, Any]:
    """A step by lists whose values are moved by programs, and the compiled step of this process."""
    compiled = autopar.parallelize(fn, **options).compile(*args)
    local = compiled.local
    world = load_pipeline(
        compiled.traced, local.split_step, local.lowered, jax.devices(), local.donated, by_hand=by_hand
    )
    return world, compiled


def fresh(leaves: list[Any]) -> list[Any]:
    return [leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf) for leaf in leaves]


def same(fn: Any, args: Any, **options: Any) -> tuple[PipelineProgram, list[Any]]:
    """Asserts that two steps give the bits of the plain lists, from arrays that are whole and from those that lie."""
    world, compiled = loaded(fn, args, **options)
    local, leaves = compiled.local, jax.tree.leaves(args)
    want = local.run(local.place_all(fresh(leaves)), fresh(leaves))
    got = world.run(world.place_all(fresh(leaves)), fresh(leaves))
    at_home = world.shard_all(fresh(leaves))
    for array, sharding in zip(at_home, world.program.input_shardings, strict=False):
        assert array.sharding == sharding
    again = world.run(world.place_all(at_home), at_home)
    for a, b, c, sharding in zip(got, again, want, world.program.output_shardings, strict=True):
        assert a.dtype == c.dtype and a.sharding == b.sharding == sharding
        assert np.array_equal(data(a), data(c)) and np.array_equal(data(b), data(c))
    updates = {o.updates: n for n, o in enumerate(compiled.traced.graph.outputs) if o.updates}
    for i, x in enumerate(compiled.traced.graph.inputs):
        if x.name in updates:  # the next step takes the state as it lies
            assert got[updates[x.name]].sharding == world.program.input_shardings[i]
    sent = {id(e): e for e in world.prepare(frozenset()).exchanges.values()}
    assert sent and all(e.program is not None for e in sent.values())
    return world, list(got)


def forward(w: Any, x: Any) -> Any:
    y = layers(w, x)
    return {"rows": y.sum(1), "flag": (y > 0).any(), "wave": jnp.fft.fft(y[:, :2]).mean(0)}


def test_stages_with_two_workers(x64: None) -> None:
    world, _ = same(train, (state(), batch()), **by_hand(num_microbatches=4, schedule="chimera"))
    assert len(world.workers_here) == 2


def test_parameters_of_two_stages_metrics_recomputation_and_donated_state(x64: None) -> None:
    search = autopar.search.Manual(dp=4, pp=2, recompute="full")
    world, got = same(tied, (state(), batch()), **by_hand(search=search, donate_argnums=0))
    # Small results that are no state are on all devices, state on those of its stage.
    assert {len(a.sharding.device_set) for a in got} == {4, 8}
    assert world.footprint_bytes > 0 and len(world.worker_memory) == 2


def test_what_is_donated_is_gone_and_the_rest_stays(x64: None) -> None:
    world, _ = loaded(train, (state(), batch()), **by_hand(donate_argnums=0))
    leaves = world.shard_all(fresh(jax.tree.leaves((state(), batch()))))
    for _ in range(3):
        results = world.run(world.place_all(leaves), leaves)
        assert [leaf.is_deleted() for leaf in leaves] == [True] * 4 + [False]
        leaves = [*results[:4], leaves[-1]]


def test_forward_alone_with_results_of_all_kinds(x64: None) -> None:
    _, got = same(forward, (state(), batch()), **by_hand())
    assert all(a.is_fully_replicated for a in got)


def narrow(w: Any, x: Any) -> Any:
    y = layers(w, x)
    return {"whole": (7 * y).sum(0).astype(jnp.int4), "flags": (y > 0).sum(0).astype(jnp.uint2), "rows": y.sum(1)}


def test_small_results_whose_elements_share_bytes_are_told_to_all_processes(x64: None) -> None:
    _, got = same(narrow, (state(), batch()), **by_hand())
    assert all(a.is_fully_replicated for a in got) and {a.dtype.name for a in got} >= {"int4", "uint2"}


def test_random_keys_go_between_stages(x64: None) -> None:
    same(with_keys, ({**state(), "key": jax.random.key(3)}, batch()), **by_hand())


def test_layers_of_several_stages_in_one_array(x64: None) -> None:
    _, got = same(stacked, (np.stack(state()["layers"]), batch()), **by_hand())
    assert max(s.data.shape[0] for s in got[0].addressable_shards) == 2  # a device has the layers of its stage alone


@pytest.mark.slow
def test_layers_of_several_stages_of_each_worker_in_one_array(x64: None) -> None:
    options = {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved", "mesh_shape": (4,)}
    _, got = same(stacked, (np.stack(state(8)["layers"]), batch()), **options)
    assert len(got[0].sharding.device_set) == 4  # between steps all of them lie on the first stage


def test_stages_with_different_meshes(x64: None) -> None:
    world, _ = same(train, (state(6), batch()), num_stages=3, num_microbatches=4)
    assert len({len(p.mesh.devices.flat) for p in world.loaded.values()}) == 2


def test_state_in_host_memory(x64: None) -> None:
    fn, args = mlp.build("tiny", optimizer="adam", dtype="float64", layers=2, hidden=16)
    options: dict[str, Any] = by_hand(donate_argnums=0)
    plan = autopar.parallelize(fn, **options).plan(*args)
    paths = {i.path for i in plan.content.inputs if "mu" in i.path}
    inputs = tuple(
        msgspec.structs.replace(i, memory="host" if i.path in paths else "device") for i in plan.content.inputs
    )
    _, got = same(fn, args, plan=Plan(msgspec.structs.replace(plan.content, inputs=inputs)), donate_argnums=0)
    assert paths and sum(a.sharding.memory_kind == PINNED_HOST for a in got) == len(paths)


@pytest.mark.slow
def test_slices_of_tokens(x64: None) -> None:
    sizes = {"dtype": "float64", "layers": 2, "hidden": 8, "heads": 4, "vocab": 16, "seq": 6, "batch": 8}
    fn, args = gpt.build(**sizes)
    same(fn, args, num_stages=2, num_microbatches=2, schedule="1f1b", token_slices=(3, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
def test_branches_side_by_side(x64: None, microbatches: int) -> None:
    fn, args = Towers((2, 2)).build()
    same(fn, args, num_stages="auto", num_microbatches=microbatches, schedule="branches")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "workers"),
    [("gpipe", 2, 2), ("interleaved", 4, 2), ("1f1b", 4, 4), ("zb-h1", 4, 4), ("zb-h2", 4, 4), ("zb-v", 4, 2)],
)
def test_more_schedules(x64: None, schedule: str, stages: int, workers: int) -> None:
    options = {"num_stages": stages, "num_microbatches": 4, "schedule": schedule, "mesh_shape": (8 // workers,)}
    same(train, (state(8), batch()), **options)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_schedules_without_a_flush(x64: None, schedule: str) -> None:
    fn, args = mlp.build("tiny", layers=4, hidden=16, batch=16, dtype="float64", optimizer="adam")
    args = jax.tree.map(np.asarray, args)
    compiled = autopar.parallelize(fn, **by_hand(num_microbatches=4, schedule=schedule)).compile(*args)
    local = compiled.local
    under = local.under
    world = load_stale(compiled.traced, under.split_step, under.lowered, local.windows, jax.devices(), by_hand=False)
    assert world.footprint_bytes == local.footprint_bytes
    graph, count = compiled.traced.graph, len(jax.tree.leaves(args[0]))
    updates = {o.updates: n for n, o in enumerate(graph.outputs) if o.updates}
    ends = []
    for program in (local, world):
        leaves, carry, results = jax.tree.leaves(args), {}, []
        for number in range(4):
            results, carry = program.call(program.place_all(leaves), carry, number)
            leaves = [
                results[updates[i.name]] if i.name in updates else leaf
                for i, leaf in zip(graph.inputs, leaves, strict=True)
            ]
        ends.append((dict(enumerate(results)), carry, program.drain(leaves[:count], carry, 4)))
    for plain, moved in zip(*ends, strict=True):
        assert plain.keys() == moved.keys() and plain
        for key, array in plain.items():
            assert np.array_equal(array, moved[key]), key


def test_a_value_inside_one_process_changes_hands(x64: None) -> None:
    world, _ = loaded(train, (state(), batch()), by_hand=True, **by_hand())
    assert {e.program for e in world.prepare(frozenset()).exchanges.values()} == {None}
