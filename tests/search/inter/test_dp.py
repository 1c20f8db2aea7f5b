"""The dynamic program finds what exhaustive search finds."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autopar.search.pipeline.candidates import first_of
from autopar.search.pipeline.partition import Slice, StageCosts, can_be_sliced, slice_layers


def random_costs(rng, layers, sizes, sparse):
    shape = (len(sizes), layers, layers)
    own = rng.uniform(0.5, 2.0, (len(sizes), layers))
    seconds, fixed, held = (np.full(shape, np.inf) for _ in range(3))
    for kind, first in itertools.product(range(len(sizes)), range(layers)):
        for last in range(first, layers):
            if rng.random() < sparse:
                continue
            seconds[kind, first, last] = own[kind, first : last + 1].sum() / sizes[kind] + rng.uniform(0, 0.3)
            fixed[kind, first, last] = rng.uniform(1, 4) * (last - first + 1) / sizes[kind]
            held[kind, first, last] = rng.uniform(0, 1)
    return StageCosts(tuple(sizes), seconds, fixed, held)


def with_sends(rng, costs):
    """``costs`` with what stages send across their two boundaries, some of which take longer than all they compute."""
    n = costs.num_layers
    sends = np.zeros((len(costs.sizes), n + 1))
    sends[:, 1:n] = rng.choice([0.1, 0.5, 5.0], (len(costs.sizes), n - 1))
    first, last = sends[:, :n, None], sends[:, None, 1:]
    sent_s, slowest_s = first + last, np.maximum(first, last)
    return dataclasses.replace(costs, seconds=costs.seconds + sent_s, sent_s=sent_s, slowest_s=slowest_s)


def objective(times, betweens, microbatches):
    """Seconds of a step of stages that take ``times`` a microbatch, with so long between two microbatches."""
    return sum(times) + ((microbatches - 1) * max(betweens) if microbatches > 1 else 0.0)


def between_s(costs, x, seconds):
    """Seconds between two microbatches of a stage: what it computes, or sends across a boundary next to that."""
    if np.ndim(costs.sent_s) == 0:
        return seconds
    at = (x.kind, x.first, x.last)
    computed, sent = seconds - costs.sent_s[at], costs.slowest_s[at]
    return max(computed, sent, 2 * (computed + sent) / 3)


def with_recomputation(rng, costs):
    """``costs`` with two more ways of each stage, slower and smaller."""
    slower = [
        dataclasses.replace(
            costs, seconds=costs.seconds * more, activation_bytes=costs.activation_bytes * rng.uniform(0, less)
        )
        for more, less in ((1.1, 0.8), (1.4, 0.3))
    ]
    return dataclasses.replace(costs, others=tuple(slower))


def fastest_s(costs, x, in_flight, limits):
    """Seconds of the fastest way of a stage that fits."""
    ways = (costs, *costs.others)
    at = (x.kind, x.first, x.last)
    fitting = [w for w in ways if w.fixed_bytes[at] + in_flight * w.activation_bytes[at] <= limits[costs.group(x.kind)]]
    return min((w.seconds[at] for w in fitting), default=np.inf)


def exhaustive(costs, devices, microbatches, limits, num_stages):
    best = np.inf
    n = costs.num_layers
    for count in range(1, n + 1) if num_stages is None else [num_stages]:
        for cuts in itertools.combinations(range(1, n), count - 1):
            ends = [*cuts, n]
            starts = [0, *cuts]
            for kinds in itertools.product(range(len(costs.sizes)), repeat=count):
                if any(sum(costs.sizes[k] for k in kinds if costs.group(k) == g) != d for g, d in enumerate(devices)):
                    continue
                stages = [Slice(a, b - 1, k) for a, b, k in zip(starts, ends, kinds, strict=True)]
                times = [fastest_s(costs, x, min(microbatches, count - i), limits) for i, x in enumerate(stages)]
                betweens = [between_s(costs, x, t) for x, t in zip(stages, times, strict=True)]
                best = min(best, objective(times, betweens, microbatches))
    return best


@pytest.mark.parametrize("seed", range(240))
def test_it_is_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    sizes = [s for s in (1, 2, 4, 8) if s <= devices]
    microbatches = int(rng.integers(1, 9))
    limit = float(rng.uniform(2, 12))
    stages = None if rng.random() < 0.7 else int(rng.integers(1, layers + 1))
    costs = random_costs(rng, layers, sizes, rng.choice([0.0, 0.3]))
    costs = with_sends(rng, costs) if seed % 3 == 0 else costs
    costs = with_recomputation(rng, costs) if seed % 2 else costs
    found = slice_layers(costs, devices, microbatches, limit, stages)
    best = exhaustive(costs, (devices,), microbatches, (limit,), stages)
    if found is None:
        assert best == np.inf
        return
    assert found.objective == pytest.approx(best, rel=1e-9)
    assert sum(costs.sizes[x.kind] for x in found.stages) == devices
    assert [x.first for x in found.stages] == [0, *(x.last + 1 for x in found.stages[:-1])]


@pytest.mark.parametrize("seed", range(80))
def test_it_is_exhaustive_search_with_two_groups_of_devices(seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(1, 6)), (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
    kinds = [(g, s) for g, d in enumerate(devices) for s in (1, 2, 4) if s <= d]
    microbatches, limits = int(rng.integers(1, 9)), tuple(rng.uniform(2, 12, 2))
    costs = random_costs(rng, layers, [s for _, s in kinds], rng.choice([0.0, 0.2]))
    costs = dataclasses.replace(costs, groups=tuple(g for g, _ in kinds))
    found = slice_layers(costs, devices, microbatches, limits)
    best = exhaustive(costs, devices, microbatches, limits, None)
    if found is None:
        assert best == np.inf
        return
    assert found.objective == pytest.approx(best, rel=1e-9)
    for g, d in enumerate(devices):
        assert sum(costs.sizes[x.kind] for x in found.stages if costs.group(x.kind) == g) == d


def test_uneven_layers_get_uneven_slices():
    """One layer as heavy as the four others together: a stage of its own."""
    own = np.array([4.0, 1.0, 1.0, 1.0, 1.0])
    seconds = np.array([[[own[a : b + 1].sum() if b >= a else np.inf for b in range(5)] for a in range(5)]])
    nothing = np.zeros_like(seconds)
    found = slice_layers(StageCosts((1,), seconds, nothing, nothing), 2, 8, 1.0)
    assert found is not None
    assert [(x.first, x.last) for x in found.stages] == [(0, 0), (1, 4)]


def test_memory_takes_more_stages():
    own = np.ones(4)
    shape = (2, 4, 4)
    seconds, fixed = np.full(shape, np.inf), np.full(shape, np.inf)
    for kind, size in enumerate((1, 4)):
        for a in range(4):
            for b in range(a, 4):
                seconds[kind, a, b] = own[a : b + 1].sum() / size
                fixed[kind, a, b] = float(b - a + 1) * (0.5 if size == 4 else 1.0)
    costs = StageCosts((1, 4), seconds, fixed, np.zeros(shape))
    free = slice_layers(costs, 4, 4, 10.0)
    short = slice_layers(costs, 4, 4, 1.5)
    assert free is not None
    assert short is not None
    assert len(free.stages) == 1
    assert len(short.stages) == 4
    assert slice_layers(costs, 4, 4, 0.5) is None


@pytest.mark.parametrize(
    ("sent", "expected"), [(0.0, 6.0 + 4 * 3.0), (1.0, 10.0 + 4 * 3.0), (3.0, 18.0 + 4 * 4.0), (9.0, 42.0 + 4 * 9.0)]
)
def test_the_objective_is_the_fill_and_the_slowest_stage_or_send_once_more_a_microbatch(sent, expected):
    """Of stages that take 1, 3 and 2: without sends Zheng et al. (2022), equation 2."""
    own, sends = [1.0, 3.0, 2.0], np.array([0.0, sent, sent, 0.0])
    seconds = np.full((1, 3, 3), np.inf)
    sent_s, slowest_s = (sends[:-1, None] + sends[1:])[None], np.maximum(sends[:-1, None], sends[1:])[None]
    for n in range(3):
        seconds[0, n, n] = own[n] + sent_s[0, n, n]
    nothing = np.zeros_like(seconds)
    costs = StageCosts((1,), seconds, nothing, nothing, sent_s=sent_s, slowest_s=slowest_s)
    found = slice_layers(costs, 3, 5, 1.0)
    assert found is not None and found.objective == expected


@pytest.mark.parametrize("seed", range(60))
def test_the_first_memory_with_a_slicing_is_found_by_halves(seed):
    """As one after another is tried; where none has a slicing, one look says so."""
    rng = np.random.default_rng((17, seed))
    layers, microbatches = int(rng.integers(2, 6)), int(rng.integers(1, 9))
    costs = with_recomputation(rng, random_costs(rng, layers, [1, 2], 0.1))
    stages, limit_bytes = int(rng.integers(1, layers + 1)), float(rng.uniform(0.5, 6.0))
    excesses, relaxed = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0), []

    def can(excess):
        relaxed.append(excess)
        return can_be_sliced(costs, 4, microbatches, limit_bytes * excess, stages)

    having = [e for e in excesses if slice_layers(costs, 4, microbatches, limit_bytes * e, stages) is not None]
    assert tuple(first_of(excesses, can)) == tuple(having[:1])
    assert len(relaxed) <= (6 if having else 2)
