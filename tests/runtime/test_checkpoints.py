"""Checkpoints: what comes back is what was saved, or an error; never a part."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import CheckpointError, Checkpoints
from autopar.runtime import checkpoints as module
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


REMAINS = "0123456789abcdef"


def test_a_save_that_was_killed_between_two_names_lost_nothing(tmp_path: Path) -> None:
    """With keep=1 there is one checkpoint, and it is being replaced: the old one is found under its other name."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, state())
    (tmp_path / "step-00000004").rename(tmp_path / f".step-00000004.{REMAINS}.old")
    other = Checkpoints(tmp_path, keep=1)
    assert other.steps == (4,)
    assert same(other.restore(jax.eval_shape(state)), state())


@pytest.mark.parametrize("exchanged", [True, False])
def test_at_any_moment_of_a_second_save_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, {"x": jnp.zeros(2)})
    if not exchanged:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    rename, moments = os.rename, []

    def watched(a: Path, b: Path) -> None:
        rename(a, b)
        kept = tmp_path.parent / f"{tmp_path.name}-{len(moments)}"  # as a kill would leave it
        shutil.copytree(tmp_path, kept)
        moments.append(Checkpoints(kept, keep=1).steps)

    monkeypatch.setattr(module.os, "rename", watched)
    checkpoints.save(4, {"x": jnp.ones(2)})
    monkeypatch.undo()
    assert moments
    assert all(found == (4,) for found in moments)
    assert checkpoints.restore({"x": jnp.zeros(2)})["x"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_what_killed_saves_left_is_removed_and_what_is_written_is_not(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state())
    (tmp_path / f".step-00000001.{REMAINS}.part").mkdir()
    (tmp_path / f".step-00000001.{REMAINS}.old").mkdir()
    with module.Save(tmp_path, "step-00000009") as alive:
        checkpoints.save(2, state())
        assert sorted(p.name for p in tmp_path.iterdir()) == [alive.part.name, "step-00000001", "step-00000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_checkpoints_are_their_owners_alone(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "run").save(1, state())
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_is_a_number(tmp_path: Path, keep) -> None:
    with pytest.raises(CheckpointError, match="keep="):
        Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize("step", [-1, True, 1.5, "3"])
def test_steps_are_numbers(tmp_path: Path, step) -> None:
    with pytest.raises(CheckpointError, match="step="):
        Checkpoints(tmp_path).save(step, state())


def changed(content: dict, **values: object) -> dict:
    """The list with other values of its first array, and of that one's first piece."""
    leaf = next(x for x in content["leaves"] if x["path"] == "['w']")
    for name, value in values.items():
        if name in leaf and name != "shape_of_piece":
            leaf[name] = value
        else:
            leaf["pieces"][0][name.removesuffix("_of_piece")] = value
    return content


CRAFTED = {
    "overlap": {"pieces": 2},
    "huge": {"shape": [1 << 40, 1 << 40]},
    "huge piece": {"shape": [1 << 30, 4], "shape_of_piece": [1 << 30, 4]},
    "negative": {"shape": [-3, -4]},
    "outside": {"start": [2, 0]},
    "rank": {"start": [0]},
    "offset": {"offset": -8},
    "dtype": {"dtype": "no such"},
    "objects": {"dtype": "object"},
    "bytes": {"dtype": "V8"},
    "keys": {"key": "fry3"},
    "folder": {"file": "../step-00000001/process-local.bin"},
    "dots": {"file": ".."},
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_list_is_an_error(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state())
    file = tmp_path / "step-00000001" / "checkpoint.json"
    content = json.loads(file.read_text())
    if how == "overlap":  # the right number of elements, some of them twice
        leaf = next(x for x in content["leaves"] if x["path"] == "['w']")
        piece = leaf["pieces"][0]
        leaf["pieces"] = [{**piece, "shape": [2, 4]}, {**piece, "start": [1, 0], "shape": [1, 4]}]
    else:
        content = changed(content, **CRAFTED[how])
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is not what was written"):
        checkpoints.restore(jax.eval_shape(state))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["pipe", "link", "linked folder", "deep"])
def test_lists_and_folders_that_are_none_are_errors(tmp_path: Path, how: str) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, state())
    folder = tmp_path / "run" / "step-00000001"
    file = folder / ("checkpoint.json" if how in ("pipe", "deep") else "process-local.bin")
    match how:
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        case "linked folder":
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
        case _:
            file.write_text("[" * 100_000)
    with pytest.raises(CheckpointError):
        checkpoints.restore(jax.eval_shape(state))


def test_flipped_bits_of_a_list_are_errors_or_change_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state())
    file = tmp_path / "step-00000001" / "checkpoint.json"
    raw, draw = file.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        other = bytearray(raw)
        other[draw.integers(len(raw))] ^= 1 << draw.integers(8)
        file.write_bytes(other)
        try:
            found = checkpoints.restore(jax.eval_shape(state))
        except CheckpointError:
            continue
        assert same(found, state())


def test_a_training_that_is_told_to_end_saves_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with checkpoints.preemption() as told:
        for number in range(10):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if told():
                checkpoints.save(number, {"x": jnp.full(2, number)}, wait=False)
                break
    assert signal.getsignal(signal.SIGTERM) is before
    assert checkpoints.restore({"x": jnp.zeros(2, "int32")})["x"].tolist() == [3, 3]
