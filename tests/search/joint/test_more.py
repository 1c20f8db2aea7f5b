"""Chains of 4 to 8 layers and branches on 8 devices: the free plan against all that can be asked for by name.

Enumerating every sharding of these takes too long. The yardstick is the best of plans whose number of stages and of
microbatches are given, and of all ways to put branches side by side in each number of microbatches.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import AutoparError, Cluster, Plan
from autopar.search.policy import SearchPolicy
from tests.end_to_end.towers import Towers
from tests.search.problems import toy, with_policy

CASES = 100

#: Of them those that the quick suite plans.
QUICK = (1, 3)

#: Of cases where something fits: least share with a free plan that is the fastest, largest ratio, most that are missed.
SHARE, WORST, MISSED = 0.97, 1.05, 0

#: Ratios up to which a plan counts as the fastest.
EQUAL = 1 + 1e-6

DEFAULT = SearchPolicy()
EVERY = replace(DEFAULT, branches=replace(DEFAULT.branches, most_candidates=10**9))


@dataclass(frozen=True)
class More:
    """A step, where it runs, and its memory limit as a share of what the free plan needs; None for none."""

    towers: Towers
    cluster: Cluster
    memory_share: float | None

    @staticmethod
    def of(number: int) -> More:
        """A case by its number."""
        random = np.random.default_rng((20262, number))
        layers, width = int(random.integers(4, 9)), int(random.choice([32, 64, 128, 256]))
        more: dict[str, Any] = {"width": width, "batch": int(random.choice([8, 16, 32, 64]))}
        more["momentum"] = bool(random.integers(2))
        if random.integers(2):
            cut = int(random.integers(1, layers))
            depths = (cut, layers - cut) if random.integers(2) or layers < 6 else (2, 2, layers - 4)
            join = str(random.choice(["mean", "concatenate", "contrast", "apart"]))
            towers = Towers(depths, trunk=int(random.integers(0, 3)), join=join, **more)
        else:
            towers = Towers((layers - 1,), trunk=1, **more)
        nodes = int(random.choice([1, 2, 4, 8]))
        bandwidth, latency_s = float(random.choice([1e8, 1e9, 1e10])), float(random.choice([0.0, 1e-6, 1e-5]))
        flops = float(random.choice([1e10, 1e11]))
        cluster = toy(8, nodes=nodes, bandwidth=bandwidth, latency_s=latency_s, flops=flops)
        return More(towers, cluster, 0.8 if random.random() < 0.1 else None)

    def plan(self, policy: SearchPolicy = DEFAULT, **options: Any) -> Plan | None:
        """The plan that is asked for; None where there is none."""
        fn, args = self.towers.build(jnp.float32)
        parallel = autopar.parallelize(fn, cluster=self.cluster, donate_argnums=0, rewrites=False, **options)
        try:
            return with_policy(parallel, policy).plan(*args)
        except AutoparError:
            return None

    def ratio(self) -> float:
        """Seconds of the free plan over those of the fastest; nan where nothing fits, inf where only it is missed."""
        options = {}
        if self.memory_share is not None:
            free = self.plan()
            assert free is not None
            options["memory_limit"] = int(self.memory_share * free.peak_memory)
        counts = [n for n in (1, 2, 4, 8) if n <= self.towers.batch]
        asked = [
            self.plan(num_stages=stages, num_microbatches=count, **options)
            for stages, count in itertools.product((1, 2, 3, 4, 8), counts)
        ]
        asked += [self.plan(EVERY, schedule="branches", num_microbatches=count, **options) for count in counts]
        free = self.plan(**options)
        fitting = [plan for plan in (free, *asked) if plan is not None]
        if not fitting:
            return math.nan
        fastest = min(fitting, key=lambda plan: plan.step_time)
        if free is not None:
            assert free.search.lower_bound is not None
            assert free.search.lower_bound <= fastest.step_time, f"the bound is above {fastest!r}"
        return math.inf if free is None else free.step_time / fastest.step_time


@pytest.mark.slow
@pytest.mark.parametrize("number", QUICK)
def test_the_free_plan_is_the_fastest(number: int) -> None:
    assert More.of(number).ratio() <= EQUAL


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_how_often_and_how_far_free_plans_are_slower() -> None:
    ratios = {number: More.of(number).ratio() for number in range(CASES)}
    fitting = {number: ratio for number, ratio in ratios.items() if not math.isnan(ratio)}
    slower = {number: f"{ratio:.4f}" for number, ratio in fitting.items() if ratio > EQUAL}
    print(f"{len(fitting)} of {CASES} fit, slower: {slower}")
    assert sum(map(math.isinf, fitting.values())) <= MISSED, slower
    assert 1 - len(slower) / len(fitting) >= SHARE, slower
    assert max(ratio for ratio in fitting.values() if math.isfinite(ratio)) <= WORST, slower
