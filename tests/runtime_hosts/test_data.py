"""Batches of which each process has a part."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from tests.runtime_hosts.launch import results, run
from tests.runtime_hosts.programs import dense_step


def test_a_batch_in_parts_is_the_batch_whole() -> None:
    first, second = results(run("data", mesh=[2, 4], limit=60_000))
    for found in (first, second):
        assert found["early"] and found["batch"] and found["equal"] and found["lies"]
        assert found["ragged"][0] == found["dtype"][0] == "ProcessMismatchError"
        assert found["all ragged"][0] == "AutoparError" and "drop it, or pad it" in found["all ragged"][1]
    assert sorted({*first["rows"], *second["rows"]}) == list(range(16))
    assert first["ragged"] == second["ragged"] and "examples of the batch where its plan wants" in first["ragged"][1]
    shared = set(first["rows"]) & set(second["rows"])
    want = "ProcessMismatchError" if shared else ""
    assert first["values"][0] == second["values"][0] == want


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
