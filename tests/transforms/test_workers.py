"""Workers that do not wait: what happened is replayed to the bit, and no bound is broken."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import autopar
from autopar.transforms import asynchronous, dc_asgd, replay, staleness_aware_rate

CURVATURE = np.linspace(0.1, 1.0, 6)


def gradients(state, worker, clock):
    """Of a quadratic, at the state, for the worker's part of the batch."""
    return CURVATURE * (state - np.random.default_rng((worker, clock)).normal(size=6))


def update(state, grads):
    return state - 0.05 * grads


def in_threads(workers, updates, bound, seed, corrected=None):
    drawn = random.Random(seed)
    naps = [[drawn.choice([0, 0, 1, 4]) / 1000 for _ in range(updates)] for _ in range(workers)]

    def work(state, worker, clock):
        time.sleep(naps[worker][clock])
        return gradients(state, worker, clock)

    with ThreadPoolExecutor(workers) as pool:
        return asynchronous(
            lambda w, state, clock: pool.submit(work, state, w, clock), update, np.ones(6), workers, updates, bound,
            corrected,
        )  # fmt: skip


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_the_order_that_happened_is_replayed_to_the_bit(bound):
    for seed in range(3):
        run = in_threads(4, 24, bound, seed)
        assert len(run.events) == 48 and len(run.ages) == 24
        again = replay(gradients, update, np.ones(6), run.events, 4, bound)
        np.testing.assert_array_equal(run.state, again)


def test_a_bound_of_zero_is_the_synchronous_run_to_the_bit():
    run = in_threads(3, 18, 0, 5)
    state = np.ones(6)
    for clock in range(6):
        read = state
        for worker in range(3):
            state = update(state, gradients(read, worker, clock))
    np.testing.assert_array_equal(run.state, state)
    assert run.ages == (0, 1, 2) * 6


def test_one_worker_is_plain_training_and_age_is_counted():
    run = in_threads(1, 5, None, 0)
    state = np.ones(6)
    for clock in range(5):
        state = update(state, gradients(state, 0, clock))
    np.testing.assert_array_equal(run.state, state)
    assert run.ages == (0,) * 5


def test_a_worker_that_stands_still_holds_others_back_at_the_bound():
    go, seen = threading.Event(), []

    def submit(worker, state, clock):
        seen.append((worker, clock))
        future = Future()
        if worker == 0 and clock == 0:
            threading.Thread(target=lambda: (go.wait(10), future.set_result(np.zeros(6)))).start()
        else:
            if worker == 1 and clock == 2:
                go.set()  # the last update that worker 1 may begin while worker 0 has none
            future.set_result(np.zeros(6))
        return future

    asynchronous(submit, update, np.ones(6), 2, 8, bound=2)
    first = seen.index((0, 1))
    assert Counter(w for w, _ in seen[:first])[1] == 3


def test_corrections_know_the_age():
    correct = dc_asgd(0.04)
    known = []

    def corrected(grads, now, read, age):
        known.append(age)
        return staleness_aware_rate(1.0, age) * correct(grads, now, read)

    run = in_threads(4, 16, None, 2, corrected)
    assert tuple(known) == run.ages and max(known) > 0
    again = replay(gradients, update, np.ones(6), run.events, 4, None, corrected)
    np.testing.assert_array_equal(run.state, again)
    assert (again != replay(gradients, update, np.ones(6), run.events, 4)).any()


def test_what_a_worker_raises_is_raised():
    def submit(worker, state, clock):
        future = Future()
        future.set_exception(ValueError("lost"))
        return future

    with pytest.raises(ValueError, match="lost"):
        asynchronous(submit, update, np.ones(6), 2, 4)
    with pytest.raises(autopar.AutoparError, match="0 updates"):
        asynchronous(submit, update, np.ones(6), 2, 0)
