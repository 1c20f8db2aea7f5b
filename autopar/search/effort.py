"""Effort: how much work a search may take, and how near to its bound it stops, by a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.search.overlap_policy import OverlapPolicy
from autopar.search.policy import EffortPolicy, SearchPolicy

#: Words of `autopar.parallelize`, the least effort first.
EFFORTS = ("quick", "default", "high", "exhaustive")

_POLICIES: Mapping[str, EffortPolicy] = MappingProxyType(
    {
        "quick": EffortPolicy(gap=0.05, large_gap=0.1, large_work=100_000_000, budget=500_000_000),
        "high": EffortPolicy(gap=0.002, large_gap=0.01, large_work=10_000_000_000, budget=100_000_000_000),
        "exhaustive": EffortPolicy(gap=0.0, large_gap=0.0, budget=None),
    }
)


def with_effort(policy: SearchPolicy, effort: str) -> SearchPolicy:
    """Thresholds of an effort.

    Args:
        policy: those of "default"; others of its thresholds stay, but for "exhaustive" (see `without_estimates`).
        effort: one of `EFFORTS`.
    """
    of_word = replace(policy, effort=_POLICIES.get(effort, policy.effort))
    return without_estimates(of_word) if effort == "exhaustive" else of_word


def without_estimates(policy: SearchPolicy) -> SearchPolicy:
    """Thresholds with which no estimate leaves out what may be planned, for models of a dozen layers on a node or two.

    Of one stage every number of microbatches with every level of recomputation is planned, and of pipelines every
    slicing where there are at most 2,000, else the best slicing of each pair of stages and microbatches. It is what the
    default is tested against, and takes minutes where that takes seconds.

    Args:
        policy: thresholds of which others stay as they are.
    """
    every = 10**9
    return replace(
        policy,
        effort=replace(
            policy.effort,
            gap=0.0,
            large_gap=0.0,
            least_gain=0.0,
            budget=None,
        ),
        sizes=replace(policy.sizes, tiny_operators=every, few_operators=every, small_operators=every),
        enumeration=replace(policy.enumeration, most_slicings=2_000),
        overlap=OverlapPolicy((0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.1, 0.5), stall_share=0.0),
        partition=replace(policy.partition, near_best=4.0, far=8.0, most_near=every, most_other=64),
        stages=replace(policy.stages, limit_attempts=8, segment_cost=0.0),
        schedules=replace(policy.schedules, long_idle_share=0.0),
        branches=replace(policy.branches, least_share=0.01, most_candidates=every),
    )
