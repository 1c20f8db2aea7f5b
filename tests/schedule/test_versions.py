"""Versions of weights: lists of passes audited against the formulas of the papers, and their replay as a delay."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.schedule.without_flush.schedules import VersionMap
from tests.schedule.audit import asynchronous_1f1b, audit
from tests.transforms.oracles import version_2bw


@pytest.mark.parametrize("stages", range(1, 17))
def test_pipedream_reads_the_newest_and_holds_a_version_for_each_stage_behind(stages):
    for stage, passes in enumerate(asynchronous_1f1b(stages, 64)):
        found = audit(VersionMap("pipedream", stages), stage, passes)
        assert found.newest == tuple(max(k - (stages - 1 - stage), 0) for k in range(64))
        assert found.most_versions == stages - stage == VersionMap("pipedream", stages).most_versions(stage)


@pytest.mark.parametrize("stages", range(1, 17))
def test_vertical_sync_reads_what_the_first_stage_does(stages):
    versions = VersionMap("pipedream-vertical", stages)
    lists = asynchronous_1f1b(stages, 64)
    first = audit(VersionMap("pipedream", stages), 0, lists[0]).newest
    for stage, passes in enumerate(lists):
        assert tuple(versions.reads(stage, k) for k in range(64)) == first
        assert audit(versions, stage, passes).most_versions == stages == versions.most_versions(stage)


@pytest.mark.parametrize("stages", range(1, 17))
def test_2bw_holds_two_versions(stages):
    for microbatches in sorted({stages, stages + 1, 2 * stages, 32, 64}):
        if microbatches < stages:
            continue
        versions = VersionMap("2bw", stages, microbatches)
        for stage, passes in enumerate(asynchronous_1f1b(stages, 4 * microbatches)):
            assert audit(versions, stage, passes).most_versions == 2
            for k in range(4 * microbatches):
                assert versions.reads(stage, k) == version_2bw(k + 1, microbatches)


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_there_is_no_bubble_after_the_fill(stages):
    """Equal stages, a backward pass twice as long: between the first and the last passes of a stage nobody waits."""
    seconds, lists = {"F": 1, "B": 2}, asynchronous_1f1b(stages, 40)
    done, at, free = {}, [0] * stages, [0] * stages
    spans = [[] for _ in range(stages)]
    while any(at[s] < len(lists[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(lists[s]):
                continue
            kind, k = lists[s][at[s]]
            before = (
                ("F", s - 1, k) if kind == "F" and s else ("B", s + 1, k) if kind == "B" and s < stages - 1 else None
            )
            if before is not None and before not in done:
                continue
            begin = max(free[s], done.get(before, 0))
            free[s] = done[kind, s, k] = begin + seconds[kind]
            spans[s].append((begin, free[s]))
            at[s] += 1
    for s in range(stages):
        steady = [span for span in spans[s] if 3 * stages <= span[0] <= 3 * (40 - 2 * stages)]
        assert len(steady) > 20
        assert all(a[1] == b[0] for a, b in pairwise(steady)), s


def test_lists_that_read_what_is_not_there_are_refused():
    with pytest.raises(ScheduleError, match=r"F0\.1 reads version 1; stage 0 is at version 0"):
        audit(VersionMap("pipedream", 1), 0, (("F", 0), ("F", 1), ("B", 0), ("B", 1)))
    with pytest.raises(ScheduleError, match=r"B0\.0"):
        audit(VersionMap("pipedream", 1), 0, (("B", 0), ("F", 0)))
    with pytest.raises(ScheduleError, match="3 microbatches for 4 stages"):
        VersionMap("2bw", 4, 3)
    with pytest.raises(ScheduleError, match="'ampnet'"):
        VersionMap("ampnet", 2)


def test_a_replay_of_stashed_versions_is_pipedreams_equation(x64):
    """``W(t+1) = W(t) - lr grad f(W_1(t-p+1), .., W_p(t))``, from the map of versions and from the equation."""
    stages, steps, rate = 3, 12, 0.05
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.standard_normal((steps, 4)))
    start = jnp.asarray(rng.standard_normal((stages, 4, 4)) / 2)

    def loss(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x * x)

    gradient = jax.jit(jax.grad(loss))
    versions = VersionMap("pipedream", stages)
    stashed = [[start[s]] for s in range(stages)]
    for k in range(steps):
        read = jnp.stack([stashed[s][versions.reads(s, k)] for s in range(stages)])
        g = gradient(read, xs[k])
        for s in range(stages):
            stashed[s].append(stashed[s][-1] - rate * g[s])
    history = [start]
    for t in range(steps):
        read = jnp.stack([history[max(t - (stages - 1 - s), 0)][s] for s in range(stages)])
        history.append(history[-1] - rate * gradient(read, xs[t]))
    np.testing.assert_allclose(jnp.stack([w[-1] for w in stashed]), history[-1], rtol=1e-12, atol=1e-14)
