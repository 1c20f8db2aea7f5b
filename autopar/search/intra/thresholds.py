"""Bytes up to which a compiler is asked to send collectives as one: the fastest of a few by the schedule of the step.

Joining saves a latency for each collective but one, and makes the first wait for the last. Which counts for more
depends on the latency and the bandwidth of the links: with h the bytes that take as long to send as the latency,
thresholds of h, 4 h, 16 h and 64 h are compared with the compiler's own, first for sums, then for gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.search.intra.collectives import JOINED, PricedCollective, Thresholds
from autopar.search.intra.extract import Sharding, extract
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.problem import Problem

#: Bytes between which the bandwidth of a collective is read off its price.
_SMALL, _LARGE = 1.0, float(1 << 30)


def with_thresholds(
    problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int], sharding: Sharding
) -> Sharding:
    """A sharding whose collectives are joined up to the thresholds that make its step shortest.

    Nothing changes where collectives do not overlap with computation, where few seconds of them are exposed, where
    products may run in blocks, and in stages of pipelines, of which a search plans hundreds.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node.
        sharding: from `extract`; its thresholds are compared too.
    """
    policy, least_gain = problem.policy.overlap, problem.policy.effort.least_gain
    schedules = sharding.times.schedules
    if (
        schedules is None
        or problem.subproblem.separate_programs
        or problem.request.collective_matmul != "none"
        or sharding.exposed_s <= policy.stall_share * sharding.step_s
    ):
        return sharding
    first = sharding.thresholds or Thresholds.of(problem.cost_model.stack)
    best_s, best = sharding.step_s, first
    for name, kinds in (("combine_bytes", {*JOINED} - {"all-gather"}), ("gather_bytes", {"all-gather"})):
        for bytes in _candidates(problem, sharding_problem, [c for c in sharding.sent if c.kind in kinds]):
            thresholds = replace(best, **{name: float(bytes)})
            _, exposed_s = schedules.timed(thresholds)
            step_s = sharding.compute_s + sharding.host_s + sharding.starts_s + sum(exposed_s)
            if step_s < best_s - least_gain * sharding.step_s:
                best_s, best = step_s, thresholds
    return sharding if best == first else extract(problem, sharding_problem, choice, best)


def _candidates(
    problem: Problem, sharding_problem: ShardingProblem, sent: Sequence[PricedCollective]
) -> tuple[int, ...]:
    """Thresholds by the links of what is sent; none where fewer than two collectives are."""
    if len(sent) < 2:
        return ()
    longest = max(sent, key=lambda c: (c.seconds, c.kind, c.axis))
    axes, mesh = tuple(longest.axis.split("+")), sharding_problem.mesh
    least_s, most_s = (problem.cost_model.collective_s(longest.kind, b, axes, mesh) for b in (_SMALL, _LARGE))
    half = least_s * _LARGE / (most_s - least_s) if most_s > least_s else 0.0
    power = 2 ** round(math.log2(half)) if half >= 1 else 1
    return tuple(power * factor for factor in problem.policy.overlap.joining_factors)
