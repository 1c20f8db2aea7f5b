"""Batches of which each process has a part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.runtime_hosts.launch import results, run
from tests.runtime_hosts.programs import dense_step


@pytest.mark.slow
def test_a_batch_in_parts_is_the_batch_whole() -> None:
    check_parts(results(run("data", mesh=[2, 4], limit=60_000)), 16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_batches_in_parts(seed: int) -> None:
    draw = random.Random(seed)
    processes, devices, mesh = draw.choice(
        [(2, 4, [8]), (4, 2, [4, 2]), (4, 2, [2, 4]), (3, 2, [6]), (3, 2, [2, 3]), (8, 1, [2, 4])]
    )
    batch = processes * devices * draw.choice([1, 2, 4])
    limit = draw.choice([None, 100_000])
    check_parts(results(run("data", processes, devices=devices, mesh=mesh, limit=limit, batch=batch, seed=seed)), batch)


def check_parts(worlds: Sequence[Any], batch: int) -> None:
    for found in worlds:
        assert found["early"] and found["batch"] and found["equal"] and found["lies"]
        assert found["ragged"][0] == found["dtype"][0] == "ProcessMismatchError"
        assert found["all ragged"][0] == "AutoparError" and "drop it, or pad it" in found["all ragged"][1]
    first, last = worlds[0], worlds[-1]
    assert sorted(row for row in {row for found in worlds for row in found["rows"]}) == list(range(batch))
    assert all(found["plan"] == first["plan"] for found in worlds)  # as they are written, details and all
    for name in ("ragged", "all ragged", "dtype", "values"):
        assert all(found[name] == first[name] for found in worlds), name
    assert "examples of the batch where its plan wants" in first["ragged"][1]
    shared = {row for found in worlds[:-1] for row in found["rows"]} & set(last["rows"])
    assert first["values"][0] == ("ProcessMismatchError" if shared else "")


def test_one_process_has_all_examples() -> None:
    state = {"a": np.ones((64, 128)), "b": np.ones((128, 64))}
    x = np.ones((16, 64))
    step = autopar.parallelize(dense_step)
    with pytest.raises(autopar.AutoparError, match="not known yet"):
        step.process_examples()
    assert step.process_examples(16) == tuple(range(16))
    with jax.enable_x64(True):
        step.compile(state, x)
        assert step.process_examples() == tuple(range(16))
        placed = step.local_batch(x)
        assert placed.sharding == step.shard(state, x)[1].sharding
        assert step.local_batch(x[:3]).shape == (3, 64)


def test_arrays_of_the_state_that_are_called_as_those_of_the_batch_are_not_taken_for_them() -> None:
    def averaged(state: Any, batch: Any) -> Any:
        return {"x": 0.5 * state["x"] + 0.5 * batch["x"].mean(axis=1)}

    state, batch = {"x": np.ones(16)}, {"x": np.ones((16, 64))}
    step = autopar.parallelize(averaged)
    with jax.enable_x64(True):
        step.compile(state, batch)
        placed = step.local_batch(batch)["x"]
        assert placed.shape == (16, 64) and placed.sharding == step.shard(state, batch)[1]["x"].sharding
