"""Checkpoints in Orbax's format: of other numbers of processes, other plans, plain Orbax and Flax."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state

import autopar
from tests.runtime_hosts import flax_case
from tests.runtime_hosts.launch import results, run


def step_of(w: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.tanh(x @ w["a"][0] @ w["a"][1]).mean())(w)
    return {"a": jax.tree.map(lambda p, g: p - g, w["a"], grads["a"]), "key": w["key"]}, loss


def state_of() -> Any:
    return {"a": (jnp.arange(32.0).reshape(8, 4) / 32, jnp.ones((4, 8))), "key": jax.random.key_data(jax.random.key(3))}


def test_save_and_restore_in_one_process(tmp_path: Path) -> None:
    step = autopar.parallelize(step_of, mesh_shape=(2, 4))
    x = jnp.ones((8, 8))
    state, _ = step(jax.tree.map(lambda a: a.astype(jnp.float32), state_of()), x)
    path = str(tmp_path / "run")
    assert [step.save(path, state, keep=2) for _ in range(3)] == [0, 1, 2]
    step.wait_until_saved()
    assert sorted(os.listdir(path)) == ["1", "2"]
    again = step.restore(path)
    assert jax.tree.structure(again) == jax.tree.structure(state)  # tuples are tuples
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b)
    placed = step.shard(state, x)[0]
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))
    # Another plan, of other devices.
    other = autopar.parallelize(step_of, mesh_shape=(8,))
    third, _ = other(other.restore(path, like=jax.eval_shape(lambda: state), at=1), x)
    assert np.allclose(third["a"][0], step(again, x)[0]["a"][0], atol=1e-6)
    # Nothing is known: nested dicts and lists.
    assert isinstance(autopar.parallelize(step_of).restore(path)["a"], list)


def test_what_cannot_be_restored_is_a_typed_error(tmp_path: Path) -> None:
    step = autopar.parallelize(step_of)
    with pytest.raises(autopar.CheckpointError, match="has no checkpoint; it has none"):
        step.restore(str(tmp_path))
    path = str(tmp_path / "run")
    step.save(path, state_of(), at=5, wait=True)
    with pytest.raises(autopar.CheckpointError, match="a checkpoint 5 already"):
        step.save(path, state_of(), at=5)
    with pytest.raises(autopar.CheckpointError, match="checkpoint 4; it has 5"):
        step.restore(path, at=4)
    with pytest.raises(autopar.CheckpointError, match="it has no b; it has a/0, a/1"):
        step.restore(path, like={"b": jnp.ones(3), "key": jnp.ones(2)})
    with pytest.raises(autopar.CheckpointError, match="a/0 has shape"):
        step.restore(path, like={**state_of(), "a": (jnp.ones(3), jnp.ones(3))})
    with pytest.raises(autopar.CheckpointError, match="a is not an array"):
        step.save(path, {"a": "text"})


# Orbax leaves an event loop behind where it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_damaged_checkpoint_is_a_typed_error(tmp_path: Path) -> None:
    step = autopar.parallelize(step_of)
    path = str(tmp_path / "run")
    step.save(path, state_of(), wait=True)
    for file in Path(path).rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(autopar.CheckpointError, match="cannot be read"):
        step.restore(path, like=state_of())
    gc.collect()  # the loop is reported here, and not in a test that comes later


def test_checkpoints_of_plain_orbax_and_flax_are_trained_on_and_theirs_load_ours(tmp_path: Path) -> None:
    created = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.adam(0.1))

    def step_of_flax(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    x = jnp.ones((8, 8))
    plain = jax.jit(step_of_flax)(created, x)
    with ocp.StandardCheckpointer() as theirs:
        theirs.save(tmp_path / "plain", plain)
    step = autopar.parallelize(step_of_flax)
    got = step(step.restore(str(tmp_path / "plain"), like=created), x)
    want = jax.jit(step_of_flax)(plain, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.allclose(a, b, atol=1e-6)
    step.save(str(tmp_path / "ours"), got, at=7, wait=True)
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        back = manager.restore(7, args=ocp.args.StandardRestore(jax.eval_shape(lambda: created)))
    assert type(back) is type(created)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(back), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_other_numbers_of_processes_and_other_plans(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    written = results(run("checkpoints", 2, path=path, restore=False, steps=2, limit=60_000))
    assert written[0] == written[1] and written[0]["saved"][0] == 1
    for processes, devices, mesh in ((1, 4, [4]), (2, 2, [2, 2])):
        found = results(run("checkpoints", processes, devices=devices, path=path, restore=True, steps=1, mesh=mesh))
        assert found[0]["before"] == written[0]["saved"][1]
        assert found[0]["lies"] and all(f == found[0] for f in found)
        written = found


def on_one_device(shapes: Any) -> Any:
    """Shapes as Orbax wants them for a checkpoint whose devices are not here."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "batch"), [(2, 4, 16), (3, 2, 12)])
def test_flax_goes_in_and_out_of_several_processes(
    tmp_path: Path, x64: None, processes: int, devices: int, batch: int
) -> None:
    plain = jax.jit(flax_case.step)(flax_case.state(), flax_case.batch(batch))[0]
    with ocp.StandardCheckpointer() as theirs:
        theirs.save(tmp_path / "theirs", plain)
    options = {"theirs": str(tmp_path / "theirs"), "ours": str(tmp_path / "ours"), "batch": batch}
    worlds = results(run("flax_checkpoint", processes, devices=devices, **options))
    assert all(world == worlds[0] for world in worlds) and worlds[0]["split"]
    for _ in range(flax_case.STEPS):
        plain, loss = jax.jit(flax_case.step)(plain, flax_case.batch(batch))
    assert abs(worlds[0]["loss"] / float(loss) - 1) < 1e-10
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        back = manager.restore(2, args=ocp.args.StandardRestore(on_one_device(jax.eval_shape(flax_case.state))))
    assert type(back) is type(plain) and int(back.step) == 1 + flax_case.STEPS
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(plain), strict=True):
        assert np.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_orbax_makes_no_checkpoint_of_what_several_worlds_have(tmp_path: Path) -> None:
    """Why workers on Ray write a format of autopar's own: each is a world of its own, and its part is refused."""
    with ocp.StandardCheckpointer() as first, ocp.StandardCheckpointer() as second:
        first.save(tmp_path / "one", {"stage 0": jnp.ones(4)})
        first.wait_until_finished()
        with pytest.raises(ValueError, match="already exists"):
            second.save(tmp_path / "one", {"stage 1": jnp.ones(4)})


@pytest.mark.slow
def test_orbax_refuses_state_that_lies_on_one_process(tmp_path: Path) -> None:
    """Why state of a stage inside one process goes to all of them when it is saved."""
    first, second = results(run("plain_orbax", devices=2, path=str(tmp_path / "one")))
    assert first[0] == "ValueError" and "Cannot serialize host local jax.Array" in first[1]
    assert second[0]
