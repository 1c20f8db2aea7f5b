"""Effort: how much work a search may take and how near to its bound it stops, by a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.search.exhaustive_policy import without_estimates
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
