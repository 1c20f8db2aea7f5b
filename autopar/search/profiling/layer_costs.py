"""Costs of all runs of layers, composed from those of single layers.

Of isomorphic layers one is cut out and sharded by the integer program on each kind of submesh; a stage of layers
i..j costs what its layers cost together, and what its boundaries send. So nothing is solved, compiled or measured per
candidate, and a model of equal layers takes no longer than one of few; the stages that are chosen are planned exactly
afterwards. `layer_costs` has the same from one plan of the whole model, for strategies that profile on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import send_s
from autopar.recompute import Level
from autopar.search.partition.dp import StageCosts
from autopar.search.partition.submesh import Submesh
from autopar.search.problem import Problem
from autopar.search.techniques import levels_of
from autopar.stages import Layers


@dataclass(frozen=True)
class RecomputationCosts:
    """A level of recomputation: ``loop_s`` and ``activation_bytes`` as in `LayerCosts`."""

    loop_s: np.ndarray
    activation_bytes: np.ndarray


@dataclass(frozen=True)
class LayerCosts:
    """Costs of each layer on one kind of submesh; arrays by layer.

    Args:
        loop_s: seconds of one microbatch, forward and backward.
        once_s: seconds of what is done once a step.
        state_bytes: bytes a device of parameters, optimizer state, accumulated gradients and what is added to them.
        activation_bytes: bytes a device that one microbatch in flight keeps.
        temporary_bytes: bytes a device that the pass of one microbatch needs besides.
        recomputed: what recomputation changes, by level.
    """

    loop_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    activation_bytes: np.ndarray
    temporary_bytes: np.ndarray
    recomputed: Mapping[Level, RecomputationCosts] = field(default_factory=dict)

    def at_level(self, level: Level) -> RecomputationCosts:
        """Seconds of one microbatch and bytes that it keeps at a level of recomputation."""
        return RecomputationCosts(self.loop_s, self.activation_bytes) if level == "none" else self.recomputed[level]


class CostsOfLayers(Protocol):
    """Costs of the layers of one step in one number of microbatches, however they are known."""

    @property
    def problem(self) -> Problem:
        """The problem that is planned."""

    @property
    def layers(self) -> Layers:
        """Layers of the step."""

    @property
    def count(self) -> int:
        """Number of microbatches."""

    def part(self, submesh: Submesh) -> Cluster:
        """A submesh of that kind."""

    def on(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        """Costs of all layers on a kind of submesh, and the sizes of the axes of the logical mesh that they are of."""


def stage_costs(profiler: CostsOfLayers, kinds: Sequence[Submesh]) -> StageCosts:
    """Costs of all runs of layers on each kind of submesh.

    Args:
        profiler: of the layers.
        kinds: of submeshes.
    """
    problem, layers, count = profiler.problem, profiler.layers, profiler.count
    n = len(layers.members)
    shape = (len(kinds), n, n)
    levels = levels_of(problem.job.remat)
    by_level = [tuple(np.full(shape, np.inf) for _ in range(3)) for _ in levels]
    cuts = np.array([0.0, *layers.cut_bytes])
    for kind, submesh in enumerate(kinds):
        costs, _ = profiler.on(submesh)
        sends = boundary_s(problem.cluster, submesh, layers)
        once, state = _sums(costs.once_s / count), _sums(costs.state_bytes)
        for level, (seconds, fixed, held) in zip(levels, by_level, strict=True):
            at_level = costs.at_level(level)
            loop, kept = _sums(at_level.loop_s), _sums(at_level.activation_bytes)
            # The layer whose pass runs is there as a whole.
            whole_layer = np.maximum(0.0, costs.activation_bytes - at_level.activation_bytes) + costs.temporary_bytes
            for first in range(n):
                last = np.arange(first, n)
                others_s = once[last + 1] - once[first] + sends[first] + sends[last + 1]
                seconds[kind, first, last] = loop[last + 1] - loop[first] + others_s
                fixed[kind, first, last] = state[last + 1] - state[first] + np.maximum.accumulate(whole_layer[first:])
                held[kind, first, last] = kept[last + 1] - kept[first] + cuts[first] / submesh.size
    sizes, groups = tuple(k.size for k in kinds), tuple(k.group for k in kinds)
    levels_costs = [StageCosts(sizes, seconds, fixed, held, groups) for seconds, fixed, held in by_level]
    return replace(levels_costs[0], others=tuple(levels_costs[1:]))


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first so many."""
    return np.concatenate([[0.0], np.cumsum(values)])


def boundary_s(cluster: Cluster, submesh: Submesh, layers: Layers) -> np.ndarray:
    """Seconds in which a stage sends the activations of one microbatch across each cut; cotangents take as long.

    Where its neighbour lies is not known yet: the devices after it, or before it at the cluster's end, stand for it.
    """
    first, size = cluster.group_starts[submesh.group], submesh.size
    source = range(first, first + size)
    after = range(first + size, min(first + 2 * size, cluster.num_devices))
    target = after or range(max(0, first - size), first) or source
    return np.array([send_s(cluster, cut, source, target) if cut else 0.0 for cut in (0.0, *layers.cut_bytes, 0.0)])
