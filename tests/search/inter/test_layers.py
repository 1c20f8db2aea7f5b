"""Layers cut the fewest bytes of all runs of balanced FLOPs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.microbatch import analyze
from autopar.stages import layers
from examples import gpt
from tests.microbatch.running import traced
from tests.search.problems import toy


def _mean_of_the_others(flops, count):
    """FLOPs a run, once the operators that have more than that are runs of their own."""
    rising = np.sort(flops)
    for own in range(count):
        mean = rising[: len(rising) - own].sum() / (count - own)
        if own == count - 1 or rising[len(rising) - own - 1] <= mean:
            return mean


def _least_cut(flops, cuts, count, slack):
    """The fewest bytes cut by ``count`` runs that compute, each within the limit of the least slack with an answer."""
    while True:
        limit, least = (1 + slack) * _mean_of_the_others(flops, count), np.inf
        for ends in itertools.combinations(range(1, len(flops)), count - 1):
            runs = [flops[a:b] for a, b in itertools.pairwise((0, *ends, len(flops)))]
            computing = [int((run > 0).sum()) for run in runs]
            within = [run.sum() <= limit * (1 + 1e-9) for run in runs]
            if all(n == 1 or (n > 1 and fits) for n, fits in zip(computing, within, strict=True)):
                least = min(least, sum(cuts[e - 1] for e in ends))
        if np.isfinite(least):
            return least
        slack = slack * 2 + 0.1


@pytest.mark.parametrize("seed", range(60))
def test_the_cuts_are_the_least_of_all(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 10))
    flops, cuts = rng.integers(0, 4, n).astype(float), rng.integers(0, 6, n).astype(float)
    flops[rng.permutation(n)[:2]] += 1
    flops[int(rng.integers(n))] += 10 * int(rng.integers(2))
    count = int(rng.integers(2, min(int((flops > 0).sum()), 5) + 1))
    ends = layers._best_ends(flops, cuts, count, 0.2)
    assert len(ends) == count and ends[-1] == n
    assert sum(cuts[e - 1] for e in ends[:-1]) == _least_cut(flops, cuts, count, 0.2)
    monkeypatch.setattr(layers, "MOST_RUNS", 3)
    assert layers._best_ends(flops, cuts, count, 0.2) == ends, "a few runs at a time"


def test_a_heavy_head_leaves_the_other_layers_even():
    """Cheap cuts around what computes nothing are no layers, and the head does not loosen what others may have."""
    flops = np.array([0, 0, *[1.0] * 12, 20.0, 0, 0, 0])
    cuts = np.array([1, 1, *[100] * 12, 1, 1, 1, 1, 1])
    ends = layers._best_ends(flops, cuts, 5, 0.2)
    assert [float(flops[a:b].sum()) for a, b in itertools.pairwise((0, *ends))] == [3.0, 3.0, 3.0, 3.0, 20.0]


def test_blocks_are_found_next_to_a_head_that_is_heavier_than_each():
    sequence, weights = [*"e", *"abc" * 6, *"hl"], np.array([0.0, *[0.5, 0.1, 0.4] * 6, 5.0, 0.0])
    repeats = layers.find_repeats(sequence, weights)
    assert repeats is not None and (repeats.period, repeats.count) == (3, 6)


def test_what_is_fused_goes_with_the_product_before_it_and_where_layers_are_recomputed_with_the_one_after():
    def forward(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    graph = traced(forward, ([jnp.ones((16, 16))] * 3, jnp.ones((8, 16))))[0].graph
    clustered = layers.cluster(graph, analyze(graph, 1), 3)
    products, activations = ([f"{name}.{n}" for n in range(2)] for name in ("dot_general", "tanh"))
    assert [layer[-1] for layer in clustered.members[:-1]] == activations
    assert [layer[-1] for layer in clustered.recomputed[:-1]] == products
    assert sum(clustered.recomputed, ()) == sum(clustered.members, ()), "the same operators in the same order"


def test_lighter_operators_are_layers_where_there_would_be_fewer_than_stages():
    def forward(w, x):
        return jnp.tanh(jnp.tanh(x @ w) + 1.0)

    graph = traced(forward, (jnp.ones((512, 4)), jnp.ones((8, 512))))[0].graph
    numbers = [len(layers.cluster(graph, analyze(graph, 1), 3, stages=stages).members) for stages in (1, 2)]
    assert numbers == [1, 3]


@pytest.mark.parametrize("count", [1, 2])
def test_the_bytes_of_a_cut_are_those_of_what_crosses_it(count):
    def forward(weights, x):
        return (x @ weights[0]) @ weights[1]

    graph = traced(forward, ([jnp.ones((4, 32)), jnp.ones((32, 2))], jnp.ones((8, 4))))[0].graph
    found = layers.cluster(graph, analyze(graph, count), 2)
    assert len(found.members) == 2
    assert found.cut_bytes == (8 // count * 32 * 4,)


def _in_a_loop(weights, x, memory, again):
    """A stack of four layers, each of which reads ``memory``, between two products; ``again`` if it is read after."""
    head, stack, tail = weights
    first = x @ head

    def layer(y, w):
        return jnp.tanh(y @ w) + memory @ w, None

    y, _ = jax.lax.scan(layer, first, stack)
    return (y + first + (memory if again else 0.0)) @ tail


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_over_layers_is_cut_after_any_trip_and_sends_what_every_trip_reads_once(again):
    weights = jnp.ones((4, 16)), jnp.ones((4, 16, 16)), jnp.ones((16, 2))

    def forward(weights, batch):
        x, memory = batch
        return _in_a_loop(weights, x, memory + 0.0, again)

    graph = traced(forward, (weights, (jnp.ones((8, 4)), jnp.ones((8, 16)))))[0].graph
    cuts = layers.ForwardCuts.of(graph)
    carried, first, memory = 8 * 16 * 4, 8 * 16 * 4, 8 * 16 * 4
    # Half of the FLOPs lie inside of the loop: its carry, what is added after it, and what each trip reads cross it.
    assert cuts.boundary_bytes(2) == (carried + first + memory,)


def test_a_boundary_has_the_fewest_bytes_near_it():
    def forward(weights, x):
        for w in weights:
            x = x @ w
        return x

    widths = [16, 64, 16, 64, 16]
    weights = [jnp.ones(pair) for pair in itertools.pairwise(widths)]
    graph = traced(forward, (weights, jnp.ones((8, 16))))[0].graph
    cuts = layers.ForwardCuts.of(graph)
    assert cuts.boundary_bytes(2) == (8 * 16 * 4,)
    assert cuts.boundary_bytes(4) == (8 * 64 * 4, 8 * 16 * 4, 8 * 64 * 4), "within half a stage there is one place"
    assert cuts.boundary_bytes(1) == ()


def test_every_stage_of_a_language_model_with_a_large_vocabulary_computes():
    step, args = gpt.build("tiny", abstract=True, batch=16, layers=3, vocab=4096)
    plan = autopar.parallelize(step, cluster=toy(8), num_stages=4, num_microbatches=4).plan(*args)
    assert min(stage.compute_time for stage in plan.stages) > 0.1 * max(stage.compute_time for stage in plan.stages)
