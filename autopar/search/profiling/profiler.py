"""`LayerProfiler`: costs of the layers of one step on each kind of submesh."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from autopar.cluster import Cluster
from autopar.recompute import Level, Phases, Selected, select
from autopar.search.parallel import SERIAL, WorkerPool
from autopar.search.partition.submesh import Submesh
from autopar.search.problem import Problem
from autopar.search.problem_data import without_room
from autopar.search.profiling.layer_costs import LayerCosts, RecomputationCosts
from autopar.search.profiling.sharding import PendingSharding
from autopar.search.source import Sliced, StageSource
from autopar.search.techniques import levels_of
from autopar.solver.meter import Meter
from autopar.stages import Layers


class LayerProfiler:
    """Costs of the layers of one step in one number of microbatches, which are kept in the store of the search.

    Args:
        problem: what is planned; its memory limit is that of a device.
        source: the step.
        count: number of microbatches.
        layers: of the step.
        pool: solves some of them.
    """

    def __init__(
        self, problem: Problem, source: StageSource, count: int, layers: Layers, pool: WorkerPool = SERIAL
    ) -> None:
        self.pool = pool
        self.problem, self.source, self.count, self.layers = problem, source, count, layers
        isomorphic = layers.isomorphic or tuple(range(len(layers.members)))
        by_kind: dict[int, list[int]] = {}
        for n, first in enumerate(isomorphic):
            by_kind.setdefault(first, []).append(n)
        # One from the middle: the first and last of their kind may have work of the whole step next to their own.
        self.representatives = {members[len(members) // 2]: members for members in by_kind.values()}
        # The step is cut around all of them at once: every cut is a walk over the whole step.
        self.cut: list[list[str]] = []
        self.stages: dict[int, int] = {}
        for n, members in enumerate(layers.members):
            if n in self.representatives or n == 0 or n - 1 in self.representatives:
                self.cut.append([])
            if n in self.representatives:
                self.stages[n] = len(self.cut) - 1
            self.cut[-1] += members
        self.selected: dict[tuple[int, Level], Selected] = {}

    def part(self, submesh: Submesh) -> Cluster:
        """A submesh of that kind."""
        cluster = self.problem.cluster
        return cluster.part(cluster.group_starts[submesh.group], submesh.size)

    def on(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        """Costs of all layers on a kind of submesh, and the sizes of the axes of the logical mesh that they are of."""
        asked = self.problem.job.mesh_shape
        shape = asked if asked is not None and math.prod(asked) == submesh.size else None
        of = (self.count, self.layers, submesh, shape)
        return without_room(self.problem, "layers", of, partial(self._profiled, submesh, shape))

    def _profiled(
        self, submesh: Submesh, shape: tuple[int, ...] | None, meter: Meter
    ) -> tuple[LayerCosts, tuple[int, ...]]:
        self.problem.checkpoint()
        problem = replace(self.problem, meter=meter)
        part, n = self.part(submesh), len(self.layers.members)
        self.problem.log(f"pricing {n} layers, {len(self.representatives)} of them different, on {part}")
        flops = self.layers.flops
        levels = [level for level in levels_of(self.problem.job.remat) if level != "none"]
        plain = [np.zeros(n) for _ in range(5)]
        recomputed: dict[Level, RecomputationCosts] = {
            level: RecomputationCosts(np.zeros(n), np.zeros(n)) for level in levels
        }
        # The layers that do most of the work decide the mesh: those of a stage are on one.
        heaviest, *others = sorted(self.representatives, key=lambda n: (-flops[n] * len(self.representatives[n]), n))
        deciding = PendingSharding.of(problem, part, self._piece(heaviest), self.count, shape, self.pool)
        microbatch_inputs = {layer: self._piece(layer) for layer in others}  # cut out while a worker solves the first
        first = deciding.solved()
        shape = tuple(n for _, n in first.sharding_problem.mesh.axes)
        solving = {
            n: PendingSharding.of(problem, part, piece, self.count, shape, self.pool)
            for n, piece in microbatch_inputs.items()
        }
        for layer, solved in [(heaviest, first), *((n, s.solved()) for n, s in solving.items())]:
            costs, at = solved.costs(), self.stages[layer]
            members = self.representatives[layer]
            columns = (costs.loop_s, costs.once_s, costs.state_bytes, costs.activation_bytes, costs.temporary_bytes)
            for target, values in zip(plain, columns, strict=True):
                target[members] = values[at]
            for level in levels:
                recomputation = solved.recomputed(costs, self._selected(layer, level, solved.whole))
                recomputed[level].loop_s[members] = recomputation.loop_s[at]
                recomputed[level].activation_bytes[members] = recomputation.activation_bytes[at]
        assert shape is not None
        return LayerCosts(plain[0], plain[1], plain[2], plain[3], plain[4], recomputed), shape

    def _piece(self, layer: int) -> Sliced:
        """A layer cut out of the step."""
        return self.source.piece(self.count, self.cut, self.stages[layer])

    def _selected(self, layer: int, level: Level, piece: Sliced) -> Selected:
        """Operators of a layer alone that run again at a level of recomputation."""
        key = (layer, level)
        if key not in self.selected:
            graph, (parts,) = self.problem.graph, piece.parts
            phases = Phases.of(graph, parts.body, parts.backward)
            selected: list[tuple[str, ...]] = [() for _ in range(piece.map.count)]
            selected[parts.stage] = self.layers.members[layer]
            self.selected[key] = select(graph, phases, selected, level)
        return self.selected[key]
