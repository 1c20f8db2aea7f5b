"""Gradients by Ray actors that do not wait for each other, replayed on this process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.transforms import asynchronous, replay


# Ray forks to start its daemons; where a test before this one has started jax, jax warns of that.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, 1, 0])
def test_actors_are_replayed_to_the_bit(bound):
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        curvature = np.linspace(0.1, 1.0, 6)

        def gradients(state, worker, clock):
            return curvature * (state - np.random.default_rng((worker, clock)).normal(size=6))

        @ray.remote(num_cpus=1)
        class Trainer:
            def gradients(self, state, worker, clock):
                time.sleep(0.01 * ((worker + clock) % 3))
                return gradients(state, worker, clock)

        actors = [Trainer.remote() for _ in range(3)]

        def submit(worker, state, clock):
            return actors[worker].gradients.remote(state, worker, clock).future()

        def update(state, grads):
            return state - 0.05 * grads

        run = asynchronous(submit, update, np.ones(6), 3, 18, bound)
        np.testing.assert_array_equal(run.state, replay(gradients, update, np.ones(6), run.events, 3, bound))
        if bound == 0:
            assert run.ages == (0, 1, 2) * 6
    finally:
        ray.shutdown()
