"""Layers cut the fewest bytes of all runs of balanced FLOPs."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.microbatch import analyze
from autopar.stages import layers
from tests.microbatch.running import traced


def _least_cut(flops, cuts, count, slack):
    """The fewest bytes cut by ``count`` runs, each within the limit of the least slack that has an answer."""
    while True:
        limit, least = (1 + slack) * flops.sum() / count, np.inf
        for ends in itertools.combinations(range(1, len(flops)), count - 1):
            runs = itertools.pairwise((0, *ends, len(flops)))
            if all(flops[a:b].sum() <= limit * (1 + 1e-9) for a, b in runs):
                least = min(least, sum(cuts[e - 1] for e in ends))
        if np.isfinite(least):
            return least
        slack = slack * 2 + 0.1


@pytest.mark.parametrize("seed", range(60))
def test_the_cuts_are_the_least_of_all(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 10))
    flops, cuts = rng.integers(0, 4, n).astype(float), rng.integers(0, 6, n).astype(float)
    flops[int(rng.integers(n))] += 1
    count = int(rng.integers(2, min(n, 5) + 1))
    ends = layers._best_ends(flops, cuts, count, 0.2)
    assert len(ends) == count and ends[-1] == n
    assert sum(cuts[e - 1] for e in ends[:-1]) == _least_cut(flops, cuts, count, 0.2)
    monkeypatch.setattr(layers, "MOST_RUNS", 3)
    assert layers._best_ends(flops, cuts, count, 0.2) == ends, "a few runs at a time"


@pytest.mark.parametrize("count", [1, 2])
def test_the_bytes_of_a_cut_are_those_of_what_crosses_it(count):
    def forward(weights, x):
        return (x @ weights[0]) @ weights[1]

    graph = traced(forward, ([jnp.ones((4, 32)), jnp.ones((32, 2))], jnp.ones((8, 4))))[0].graph
    found = layers.cluster(graph, analyze(graph, count), 2)
    assert len(found.members) == 2
    assert found.cut_bytes == (8 // count * 32 * 4,)
