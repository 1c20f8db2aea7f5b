"""Checkpoints: what comes back is what was saved, or an error; never a part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import CheckpointError, Checkpoints
from examples import mlp


def state(scale: float = 1.0) -> dict:
    return {
        "w": jnp.arange(12.0).reshape(3, 4) * scale,
        "half": jnp.ones((2, 2), "bfloat16") * scale,
        "none": np.zeros((0, 3), "float32"),
        "count": jnp.int32(7),
        "key": jax.random.split(jax.random.key(1), 2),
    }


def same(a, b) -> bool:
    def numbers(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return all(
        x.dtype == y.dtype and np.array_equal(np.asarray(numbers(x)), np.asarray(numbers(y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state())
    checkpoints.save(5, state(2.0), wait=False)
    shapes = jax.eval_shape(state)
    assert same(checkpoints.restore(shapes), state(2.0))
    assert same(Checkpoints(tmp_path).restore(shapes, 3), state())
    assert checkpoints.steps == (3, 5)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        checkpoints.save(step, {"x": jnp.full(2, step)})
    checkpoints.save(10, {"x": jnp.full(2, 11)})
    assert checkpoints.steps == (2, 10)
    assert checkpoints.restore({"x": jnp.zeros(2, "int32")})["x"].tolist() == [11, 11]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state())
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(2, state(3.0))
        calls.clear()
        checkpoints.save(2, state(3.0), wait=False)
        with pytest.raises(CheckpointError, match="step 2"):
            checkpoints.wait()
    assert checkpoints.steps == (1,)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert same(checkpoints.restore(state()), state())


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
@pytest.mark.parametrize("name", ["process-local.bin", "checkpoint.json"])
def test_damage_is_told_with_the_file(tmp_path: Path, how: str, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.arange(100.0)})
    damage(tmp_path / "step-00000001" / name, how)
    with pytest.raises(CheckpointError, match=name):
        checkpoints.restore({"w": jnp.arange(100.0)})


def test_other_structures_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.restore(state())
    checkpoints.save(1, {"w": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match=r"step 2.*\n.*steps 1"):
        checkpoints.restore({"w": jnp.zeros(3)}, 2)
    with pytest.raises(CheckpointError, match="'v'"):
        checkpoints.restore({"v": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match=r"float32\[3\].*float32\[4\]"):
        checkpoints.restore({"w": jnp.zeros(4)})


def test_training_goes_on_under_another_plan(tmp_path: Path) -> None:
    step, (start, batch) = mlp.build(layers=2, hidden=16, batch=8)
    one = autopar.parallelize(step)
    two = autopar.parallelize(step, num_stages=2, num_microbatches=2, schedule="gpipe")
    checkpoints = Checkpoints(tmp_path)
    middle, _ = one(start, batch)
    checkpoints.save(1, middle)
    piped, _ = two(two.shard(checkpoints.restore(jax.eval_shape(lambda: start)), batch)[0], batch)
    want, _ = jax.jit(step)(middle, batch)
    for a, b in zip(jax.tree.leaves(piped), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
