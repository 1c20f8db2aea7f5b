"""Numbers of stages and of microbatches of a large model that are worth slicing for.

Layers are priced in the fewest and in the most microbatches. In between what depends on the size of a microbatch is
taken to be affine in it, x(m) = a + b / m, and the dynamic program says for each pair of numbers how long a step takes,
and whether it fits. The best few pairs are priced for themselves afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import MicrobatchError, ScheduleError
from autopar.microbatch import batch_size, even_counts
from autopar.schedule import Schedule
from autopar.search.cuttable import CuttableStep
from autopar.search.enumeration.search_space import is_small, stage_counts
from autopar.search.outcome import Bounded
from autopar.search.partition.slicings import layers_of, slicings
from autopar.search.partition.submesh import Submesh
from autopar.search.problem import Problem
from autopar.search.profiling.layer_costs import LayerCosts, RecomputationCosts
from autopar.search.profiling.profiler import LayerProfiler
from autopar.search.trail import Region
from autopar.stages import Layers


@dataclass(frozen=True)
class InterpolatedCosts:
    """Prices of layers in a number of microbatches between two others.

    Args:
        few, many: prices in fewer and in more microbatches, of the same layers.
        count: number of microbatches.
    """

    few: LayerProfiler
    many: LayerProfiler
    count: int

    @property
    def problem(self) -> Problem:
        """The problem that is planned."""
        return self.few.problem

    @property
    def layers(self) -> Layers:
        """The layers, with what crosses cuts in one microbatch."""
        scale = self.few.count / self.count
        return replace(self.few.layers, cut_bytes=tuple(round(n * scale) for n in self.few.layers.cut_bytes))

    def part(self, submesh: Submesh) -> Cluster:
        """A submesh of that kind."""
        return self.few.part(submesh)

    def on(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        """Costs on a kind of submesh, and the sizes of the axes of the logical mesh that most microbatches are on."""
        (few, _), (many, shape) = self.few.on(submesh), self.many.on(submesh)
        recomputed = {
            level: RecomputationCosts(
                self._between(recomputation.loop_s, many.recomputed[level].loop_s),
                self._between(recomputation.activation_bytes, many.recomputed[level].activation_bytes),
            )
            for level, recomputation in few.recomputed.items()
        }
        costs = LayerCosts(
            self._between(few.loop_s, many.loop_s),
            self._between(few.once_s, many.once_s),
            self._between(few.state_bytes, many.state_bytes),
            self._between(few.activation_bytes, many.activation_bytes),
            self._between(few.temporary_bytes, many.temporary_bytes),
            recomputed,
        )
        return costs, shape

    def _between(self, few: np.ndarray, many: np.ndarray) -> np.ndarray:
        """a + b / count, of arrays by layer."""
        a, b, n = 1 / self.few.count, 1 / self.many.count, 1 / self.count
        share = (n - b) / (a - b)
        interpolated: np.ndarray = many + share * (few - many)
        return interpolated


def ranked_pairs(
    step: CuttableStep, schedule: Schedule, fewest: Mapping[int, int | None]
) -> list[tuple[int, int]] | Bounded:
    """A few pairs (microbatches, stages) that are worth slicing for; none where that is not known.

    `Bounded` where all of them take longer by far than the plan at hand.

    Args:
        step: what is planned; both numbers are free.
        schedule: of the pipeline; one stage a worker.
        fewest: by number of stages, from how many blocks on they are the layers.
    """
    problem, source = step.problem, step.source
    policy, best = problem.policy.enumeration, problem.policy.partition.ranked_pairs
    stages = stage_counts(problem, schedule)
    least = 1 if is_small(problem) else min(stages, default=batch_size(problem.graph) or 1)
    most = policy.most_ranked_per_stage * max(stages, default=1)
    counts = [n for n in even_counts(problem.graph) if least <= n <= most]
    if len(counts) < 3:
        return []
    by_cost: list[tuple[float, float, int, int]] = []
    for s in stages:
        try:
            few, many = (layers_of(problem, source, n, s, fewest[s]) for n in (counts[0], counts[-1]))
        except MicrobatchError:
            return []
        if few.members != many.members or few.isomorphic != many.isomorphic or len(few.members) < s:
            continue
        ends = (
            LayerProfiler(problem, source, counts[0], few, step.pool),
            LayerProfiler(problem, source, counts[-1], many, step.pool),
        )
        by_cost += _pairs(ends, s, _possible(problem, schedule, s, counts))
    cutoff_s = problem.policy.partition.near_best * problem.subproblem.cutoff_s
    for s in sorted({s for _, _, _, s in by_cost}):
        of_stages = [(estimate_s, count) for _, estimate_s, count, number in by_cost if number == s]
        region = Region.of_stages("pipeline", [s], sorted(count for _, count in of_stages))
        problem.trail.close(region, Bounded("layers as they are priced, an estimate", min(of_stages)[0]))
    if by_cost and all(estimate_s >= cutoff_s for _, estimate_s, _, _ in by_cost):
        return Bounded("layers as they are priced, an estimate", min(estimate_s for _, estimate_s, _, _ in by_cost))
    pairs = [(count, s) for _, estimate_s, count, s in sorted(by_cost) if estimate_s < cutoff_s]
    # Estimates err: the best few, and the best with another number of stages; of small models with each.
    firsts = {s: (count, s) for count, s in reversed(pairs)}
    ranked = {s for _, s in pairs[:best]}
    others = [pair for pair in pairs[best:] if pair == firsts[pair[1]] and pair[1] not in ranked]
    if not is_small(problem):
        others = others[:1] if len(ranked) == 1 else []
    return [*pairs[:best], *others]


def _possible(problem: Problem, schedule: Schedule, stages: int, counts: Sequence[int]) -> Iterator[int]:
    """Numbers of microbatches, one for each stage at least but where latency may be all that a small step waits for."""
    for count in counts:
        try:
            schedule.table(stages, count)
        except ScheduleError:
            continue
        if count >= stages or is_small(problem):
            yield count


def _pairs(
    ends: tuple[LayerProfiler, LayerProfiler], stages: int, counts: Iterator[int]
) -> Iterator[tuple[float, float, int, int]]:
    """(times the memory there is, seconds of a step, microbatches, stages) of each number of microbatches."""
    for count in counts:
        for excess, slicing, _ in slicings(
            InterpolatedCosts(*ends, count), stages, ends[0].problem.policy.partition.ranked_excesses
        ):
            yield excess, slicing.objective, count, stages
