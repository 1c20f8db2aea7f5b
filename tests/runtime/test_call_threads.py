"""Calls from several threads, in one process."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError
from examples.mlp import build


def in_threads(*calls: Any) -> list[BaseException]:
    """Runs functions at the same time; what they raised."""
    failed: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(c,)) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_programs_of_two_functions_reach_all_devices_in_one_order(stages: int) -> None:
    fn, (state, batch) = build("tiny", layers=2, hidden=8, batch=8)
    first = autopar.parallelize(fn, num_stages=stages, num_microbatches=2)
    second = autopar.parallelize(lambda s, b: fn(s, b), num_stages=1, num_microbatches=1)
    functions = [first, first, second, second]
    for function in (first, second):
        function.compile(state, batch)
    want = state
    for _ in range(20):
        want, _ = jax.jit(fn)(want, batch)
    got: list[Any] = []

    def train(function: Any) -> None:
        mine = state
        for _ in range(20):
            mine, _ = function(mine, batch)
        got.append(mine)

    assert not in_threads(*(lambda f=f: train(f) for f in functions))
    assert len(got) == 4
    for mine in got:
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_a_state_that_two_threads_donate_is_an_error_of_one() -> None:
    fn, (state, batch) = build("tiny", layers=2, hidden=8, batch=8)
    function = autopar.parallelize(fn, num_stages=1, num_microbatches=1, donate_argnums=(0,))
    mine, _ = function(state, batch)
    failed = in_threads(*(lambda: function(mine, batch) for _ in range(3)))
    assert len(failed) == 2
    assert all(isinstance(e, AutoparError) and "donated" in str(e) for e in failed)
