"""Stage programs write into buffers that nobody uses again, and into no others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar.lower.pipeline.stage_program import given_up
from examples import llama, mlp
from tests.end_to_end.compare import assert_trees_same
from tests.runtime.observing import observed


def compiled_pipeline(build=mlp.build, donate_argnums=(), schedule="1f1b", **overrides):
    fn, args = build(**overrides)
    step = autopar.parallelize(
        fn, num_stages=2, num_microbatches=4, schedule=schedule, mesh_shape=(4,), donate_argnums=donate_argnums
    )
    return fn, args, step, step.compile(*args)


def run_and_watch(program, args):
    """Runs a step; what lay on workers at any time and lies there no more, by the name of the value."""
    seen = {}

    def observe(_, arrays):
        seen.update(((worker, buffer), array) for worker, of in arrays.items() for buffer, array in of.items())

    end = observed(program, jax.tree.leaves(args), observe).end
    gone = {}
    for key, array in seen.items():
        if key not in end:
            gone.setdefault(key[1].value, []).append(array)
    return end, gone


@pytest.mark.slow
def test_totals_of_gradients_become_new_parameters():
    _, args, _, compiled = compiled_pipeline()
    program = compiled.local
    donating = {(w, work): p.donated for (w, work), p in program.loaded.items() if p.donated}
    assert any(work.kind == "update" for _, work in donating)
    assert all(not name.startswith("in/") for names in donating.values() for name in names)
    end, gone = run_and_watch(program, args)
    for (_, work), names in donating.items():
        for name in names:
            assert gone[name] and any(a.is_deleted() for a in gone[name]), (work, name)
    assert not any(a.is_deleted() for a in end.values())


@pytest.mark.slow
def test_compiled_programs_alias_as_many_bytes_as_are_donated():
    _, _, _, compiled = compiled_pipeline(donate_argnums=0)
    aliased = 0
    for loaded in compiled.local.loaded.values():
        if loaded.compiled is None:
            continue
        sizes = {str(a): int(n) for a, n in loaded.mesh.shape.items()}
        wanted = sum(p.local_bytes(sizes) for p in loaded.program.reads if p.name in loaded.donated)
        assert loaded.compiled.memory_analysis().alias_size_in_bytes == wanted
        aliased += wanted
    assert aliased > 0


def live_bytes(program, args):
    """Bytes on all devices of what a step began with and of what it made, as far as they are there when it ends."""
    step = observed(program, jax.tree.leaves(args))
    arrays = {id(a): a for a in (*step.start.values(), *step.end.values()) if not a.is_deleted()}
    return sum(s.data.nbytes for a in arrays.values() for s in a.addressable_shards)


@pytest.mark.slow
def test_less_is_alive_where_the_state_is_given_up():
    _, args, _, kept = compiled_pipeline(hidden=64)
    _, _, _, given = compiled_pipeline(hidden=64, donate_argnums=0)
    copy = jax.tree.map(lambda a: a + 0, args)
    placed = given.local.place_all(jax.tree.leaves(args))
    state = sum(s.data.nbytes for a in placed[: len(jax.tree.leaves(args[0]))] for s in a.addressable_shards)
    assert live_bytes(given.local, copy) <= live_bytes(kept.local, args) - 0.9 * state


@pytest.mark.slow
def test_nothing_of_the_user_is_deleted_unless_given_up():
    fn, args, step, _ = compiled_pipeline()
    first = step(*args)
    again = step(*args)
    assert not any(a.is_deleted() for a in jax.tree.leaves((args, first)))
    assert_trees_same(again, first, rtol=0)
    assert_trees_same(first, jax.jit(fn)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_a_state_that_is_given_up_trains_as_ever(schedule):
    fn, args, step, _ = compiled_pipeline(donate_argnums=0, schedule=schedule)
    ours, theirs = jax.tree.map(lambda a: a + 0, args[0]), args[0]
    for _ in range(3):
        old, (ours, metrics) = ours, step(ours, args[1])
        theirs, wanted = jax.jit(fn)(theirs, args[1])
        assert all(a.is_deleted() for a in jax.tree.leaves(old))
        assert_trees_same((ours, metrics), (theirs, wanted))
    assert not any(a.is_deleted() for a in jax.tree.leaves(args[1]))


@pytest.mark.slow
def test_one_array_for_two_arguments():
    """An array that is given up as one argument and kept as another stays."""

    def fn(state, data):
        def loss(w):
            return jax.numpy.mean((jax.numpy.tanh(data["x"] @ w["a"]) @ w["b"] - data["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        moved = jax.tree.map(lambda p, q: np.float32(0.5) * (p + q), state, data["mean"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, moved, grads), value

    state = {"a": jax.numpy.ones((8, 8)) * 0.1, "b": jax.numpy.ones((8, 8)) * 0.2}
    data = {"x": jax.numpy.ones((16, 8)), "y": jax.numpy.ones((16, 8)), "mean": state}
    step = autopar.parallelize(fn, num_stages=2, num_microbatches=2, donate_argnums=0)
    want = jax.jit(fn)(state, data)
    compiled = step.compile(state, data)
    assert compiled.plan.content.donated
    got = step(state, data)
    assert_trees_same(got, want)


@pytest.mark.slow
def test_stacked_leaves_are_recorded_and_given_up():
    text = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "vocab": 16, "seq": 4, "batch": 4}
    fn, args, step, compiled = compiled_pipeline(llama.build, donate_argnums=0, **text)
    recorded = set(compiled.plan.content.donated)
    assert recorded == {r.path for r in compiled.plan.content.inputs if r.role in ("parameter", "optimizer", "other")}
    want = jax.jit(fn)(*args)
    state = jax.tree.map(lambda a: a + 0, args[0])
    got = step(state, args[1])
    assert_trees_same(got, want)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))


@pytest.mark.slow
def test_what_is_sent_is_not_written_over():
    _, _, _, compiled = compiled_pipeline()
    instructions = compiled.local.lowered.instructions
    for w in instructions.workers:
        sent = {i.value.value for i in w.instructions if isinstance(i, autopar.schedule.Send)}
        assert sent
        assert not any(names & sent for names in given_up(instructions, w.worker).values())
