"""Stale synchronous parallelism: the bound over drawn speeds, and replay of recorded orders."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.errors import AutoparError
from autopar.transforms.asynchronous import Clocks, WorkerEvent, drawn_events, replay
from tests.transforms.oracles import stability_limit


def drawn_speeds(seed):
    drawn = random.Random(seed)
    base = [drawn.uniform(0.2, 5) for _ in range(drawn.randint(2, 6))]
    return len(base), (lambda worker: base[worker] * drawn.expovariate(1) + 1e-3)


@pytest.mark.slow
def test_no_lead_is_over_the_bound():
    """10,000 drawn sets of speeds. A worker that begins is at most s ahead, so it is at most s + 1 when it is done."""
    waited = 0
    for seed in range(10_000):
        workers, seconds = drawn_speeds(seed)
        bound = seed % 4
        counts = [0] * workers
        begun = set()
        for event in drawn_events(seconds, workers, 12, bound):
            if event.kind == "read":
                assert counts[event.worker] - min(counts) <= bound
                begun.add(event.worker)
            else:
                begun.remove(event.worker)
                counts[event.worker] += 1
                assert max(counts) - min(counts) <= bound + 1
            waited += len(begun) < workers and event.kind == "update"
    assert waited  # somebody had to wait, or the bound was not tried


def test_without_a_bound_nobody_waits():
    events = drawn_events(lambda worker: 1.0 if worker else 10.0, 3, 40, None)
    counts = [sum(e.worker == w and e.kind == "update" for e in events) for w in range(3)]
    assert max(counts) - min(counts) > 10


def test_bound_of_zero_is_synchronous_to_the_bit():
    """Every worker reads the same state in each round; updates come worker by worker."""
    rng = np.random.default_rng(0)
    targets = rng.standard_normal((4, 6, 3))

    def gradients(w, worker, clock):
        return 0.1 * (w - targets[worker, clock])

    order = [
        e
        for _ in range(6)
        for e in (*(WorkerEvent(w, "read") for w in range(4)), *(WorkerEvent(w, "update") for w in range(4)))
    ]
    got = replay(gradients, lambda w, g: w - g, np.zeros(3), order, 4, 0)
    wanted = np.zeros(3)
    for clock in range(6):
        made = [gradients(wanted, worker, clock) for worker in range(4)]
        for g in made:
            wanted = wanted - g
    np.testing.assert_array_equal(got, wanted)
    for event in drawn_events(lambda w: 1.0 + w, 4, 24, 0):
        assert event.kind in ("read", "update")


def test_an_order_is_replayed_as_it_was():
    """A thread of events and its replay, told apart by what each update read."""
    workers, seconds = drawn_speeds(7)
    events = drawn_events(seconds, workers, 40, 2)
    state, read = np.float64(1.0), {}
    for event in events:
        if event.kind == "read":
            read[event.worker] = state
        else:
            state = state - 0.05 * read.pop(event.worker)
    assert replay(lambda w, worker, clock: 0.05 * w, lambda w, g: w - g, np.float64(1.0), events, workers, 2) == state


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_workers_in_turn_are_a_delay_of_one_less_than_their_number(factor):
    workers = 4
    rate = factor * stability_limit(workers - 1)
    order = [WorkerEvent(w, "read") for w in range(workers)]
    for n in range(4000):
        order += [WorkerEvent(n % workers, "update"), WorkerEvent(n % workers, "read")]
    sizes = []
    replay(lambda w, *_: w, lambda w, g: sizes.append(abs(w)) or w - rate * g, 1.0, order, workers)
    assert (max(sizes[2000:]) < max(sizes[:2000])) is (factor < 1)


def test_a_lost_worker_holds_nobody_back():
    clocks = Clocks((5, 2, 5), 1)
    assert not clocks.may_begin(0) and clocks.may_begin(1)
    assert clocks.leave(1).may_begin(0)
    assert clocks.seen(0) == 2 and clocks.done(1).counts == (5, 3, 5)


def test_what_breaks_the_bound_is_refused():
    late = [WorkerEvent(0, "read"), WorkerEvent(0, "update"), WorkerEvent(0, "read")]
    with pytest.raises(AutoparError, match=r"event 2: worker 0 reads at clocks \(1, 0\), bound 0"):
        replay(lambda *_: 0.0, lambda w, g: w, 0.0, late, 2, 0)
    with pytest.raises(AutoparError, match="without having read"):
        replay(lambda *_: 0.0, lambda w, g: w, 0.0, [WorkerEvent(1, "update")], 2)
    with pytest.raises(AutoparError, match="0 workers"):
        Clocks.of(0, 1)
