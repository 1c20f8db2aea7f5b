"""`LayerProfiler`: costs of the layers of one step on each kind of submesh, and of all runs of layers.

Of isomorphic layers one is cut out and sharded by the integer program, without a memory limit, on each kind of submesh;
a stage of layers i..j costs what its layers cost together, and what its boundaries send. So nothing is solved, compiled
or measured per candidate, and a model of equal layers takes no longer than one of few; the stages that are chosen are
planned exactly afterwards. `layer_costs` has the same from one plan of the whole model, for strategies that profile on
one device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import send_s
from autopar.ir import Layout
from autopar.recompute import Level, Phases, Selected, select
from autopar.search.intra import ShardingProblem
from autopar.search.intra.collectives import collectives
from autopar.search.intra.extract import copy_layouts, memory_of, value_layouts
from autopar.search.intra.sharding_problem import ValueDraft
from autopar.search.intra.stage_loops import StageLoops
from autopar.search.job import Solving
from autopar.search.mesh_search import MeshSearch
from autopar.search.pipeline.partition import StageCosts, Submesh
from autopar.search.problem import Problem, Reporting
from autopar.search.problem_data import key_without_room, without_room
from autopar.search.source import Sliced, StageSource
from autopar.search.store import Key, count_once
from autopar.search.techniques import levels_of
from autopar.search.worker_pool import SERIAL, Future, WorkerPool
from autopar.solver import Solution
from autopar.solver.goal import Goal
from autopar.solver.meter import Meter
from autopar.stages import Layers, StageMap


@dataclass(frozen=True)
class RecomputationCosts:
    """Costs of each layer at one level of recomputation; arrays by layer.

    Args:
        loop_s: seconds of one microbatch, forward and backward, what runs again included.
        activation_bytes: bytes a device that one microbatch in flight keeps.
    """

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
    sent_s, slowest_s = np.zeros(shape), np.zeros(shape)
    cuts = np.array([0.0, *layers.cut_bytes])
    for kind, submesh in enumerate(kinds):
        costs, _ = profiler.on(submesh)
        sends = boundary_s(problem.cluster, submesh, layers)
        sent_s[kind] = sends[:-1, None] + sends[1:]
        slowest_s[kind] = np.maximum(sends[:-1, None], sends[1:])
        once, state = _sums(costs.once_s / count), _sums(costs.state_bytes)
        for level, (seconds, fixed, held) in zip(levels, by_level, strict=True):
            at_level = costs.at_level(level)
            loop, kept = _sums(at_level.loop_s), _sums(at_level.activation_bytes)
            # The layer whose pass runs is there as a whole.
            whole_layer = np.maximum(0.0, costs.activation_bytes - at_level.activation_bytes) + costs.temporary_bytes
            for first in range(n):
                last = np.arange(first, n)
                others_s = once[last + 1] - once[first] + sent_s[kind, first, last]
                seconds[kind, first, last] = loop[last + 1] - loop[first] + others_s
                fixed[kind, first, last] = state[last + 1] - state[first] + np.maximum.accumulate(whole_layer[first:])
                held[kind, first, last] = kept[last + 1] - kept[first] + cuts[first] / submesh.size
    sizes, groups = tuple(k.size for k in kinds), tuple(k.group for k in kinds)
    levels_costs = [
        StageCosts(sizes, seconds, fixed, held, groups, sent_s, slowest_s) for seconds, fixed, held in by_level
    ]
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


def layer_costs(problem: Problem, part: Cluster, whole: Sliced, by_layer: StageMap, count: int) -> LayerCosts:
    """Costs by layer on the submesh ``part``, from the best plan of the whole model on it.

    Args:
        problem: what is planned.
        part: the submesh.
        whole: the step as one stage.
        by_layer: layers of all operators.
        count: number of microbatches.
    """
    return PendingSharding.of(problem, part, whole, count).solved(by_layer).costs()


@dataclass(frozen=True)
class _Answer:
    """The choice problem of a mesh and its answer, which is wanted later."""

    future: Future[tuple[ShardingProblem, Solution]]

    @staticmethod
    def begun(problem: Problem, mesh: LogicalMesh, pool: WorkerPool) -> _Answer:
        """The answer of a mesh without a limit."""
        return _Answer(pool.submit(_without_limit, problem, mesh))

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""
        done = self.future.outcome if self.future.done.is_set() else None
        return done[0].entries if isinstance(done, tuple) else 0


@dataclass(frozen=True)
class PendingSharding:
    """A step, or a part of it, that is being planned on the logical meshes of a submesh.

    Args:
        problem: it as one stage.
        whole: where its operators are from.
        count: number of microbatches.
        answers: by the key of a mesh.
    """

    problem: Problem
    whole: Sliced
    count: int
    answers: Mapping[Key, _Answer]

    @staticmethod
    def of(
        problem: Problem,
        part: Cluster,
        whole: Sliced,
        count: int,
        shape: tuple[int, ...] | None = None,
        pool: WorkerPool = SERIAL,
    ) -> PendingSharding:
        """Begins on all logical meshes of ``part``, or on that of ``shape``."""
        job = replace(problem.job, constraints=whole.constraints(0, problem.job.constraints))
        cost_model = problem.cost_model.on(part)
        single = replace(problem, graph=whole.graphs[0], cluster=part, cost_model=cost_model, job=job)
        # No clock decides what layers cost: costs are the same on a loaded machine.
        solving = Solving(steps=problem.solving.steps, seed=problem.solving.seed)
        silent = replace(single, reporting=Reporting(), solving=solving, source=None, anytime=None)
        answers: dict[Key, _Answer] = {}
        for mesh in part.logical_meshes(shape):
            key, begun = key_without_room(silent, "layer", mesh), partial(_Answer.begun, silent, mesh, pool)
            answers[key] = problem.store.once(key, begun)
        return PendingSharding(single, whole, count, answers)

    def solved(self, by_layer: StageMap | None = None) -> LayerSharding:
        """The cheapest; by the layers of ``by_layer``, or of the whole."""
        every = [begun.future.result() for begun in self.answers.values()]
        for key, begun in self.answers.items():
            count_once(key.text, self.problem.meter, begun.future.meter)
        solved = [a for a in every if a[1].found]
        assert solved, "without a memory limit there is always a choice"
        sharding_problem, answer = min(solved, key=lambda a: a[1].objective)
        return LayerSharding(
            self.problem, sharding_problem, answer.choice, self.whole, by_layer or self.whole.map, self.count
        )


def _without_limit(problem: Problem, mesh: LogicalMesh) -> tuple[ShardingProblem, Solution]:
    """The choice problem of one stage on a mesh, and its cheapest choice without the limit, up to the gap of plans."""
    meshes = MeshSearch(problem)
    sharding_problem = meshes.program(mesh)
    relaxed = meshes.relaxed(sharding_problem)
    if relaxed is not None and Goal(problem.policy.effort.sharding_gap).reached(relaxed.objective, relaxed.lower_bound):
        return sharding_problem, relaxed
    return sharding_problem, meshes.unlimited(sharding_problem, relaxed)


@dataclass(frozen=True)
class LayerSharding:
    """A plan of the whole model, or of a part of it, on a submesh, by layer.

    Args:
        problem: the model as one stage.
        sharding_problem: its choice problem.
        choice: the answer.
        whole: where the stage's operators are from.
        by_layer: layers of the step's operators.
        count: number of microbatches.
    """

    problem: Problem
    sharding_problem: ShardingProblem
    choice: Sequence[int]
    whole: Sliced
    by_layer: StageMap
    count: int

    @cached_property
    def _loops(self) -> StageLoops:
        return StageLoops(self.problem.graph)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Layout of every value."""
        return value_layouts(self.sharding_problem, self.choice)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds a step by operator of the stage's graph, collectives before it included."""
        seconds: dict[str, float] = defaultdict(float)
        for s in self.sharding_problem.sites:
            seconds[s.id] += float(s.seconds[self.choice[s.node]])
        copies = copy_layouts(self.sharding_problem, self.choice, self.layouts)
        for c in collectives(self.problem, self.sharding_problem, self.choice, self.layouts, copies):
            seconds[c.use.consumer] += c.seconds
        return seconds

    def origin(self, key: str) -> str | None:
        """The step's operator that an operator or a value of the stage's graph is of, or is inside of."""
        origins, id = self.whole.origins[0], key.partition(":")[0]
        while id not in origins:
            id, inside, _ = id.rpartition("/body/")
            if not inside:
                return None
        return origins[id]

    def layer(self, key: str) -> int | None:
        """The layer of an operator or a value of the stage's graph."""
        origin = self.origin(key)
        stages = None if origin is None else self.by_layer.update.get(origin) or self.by_layer.body.get(origin)
        return stages[-1] if stages else None

    def costs(self) -> LayerCosts:
        """Costs of each layer without recomputation."""
        n = self.by_layer.count
        roles = {i.name: i.role for i in self.problem.graph.inputs}
        loop_s, once_s, state, saved = (np.zeros(n) for _ in range(4))
        for id, seconds in self.seconds.items():
            layer, inside = self.layer(id), self._loops.holds(id)
            target, amount = (loop_s, seconds / self.count) if inside else (once_s, seconds)
            if layer is None:
                target += amount / n  # joins of contributions, and what belongs to no operator of the step
            else:
                target[layer] += amount
        for v in self.sharding_problem.values.values():
            stages = self.by_layer.inputs.get(v.source) if v.source and v.key in self.layouts and not v.alias else None
            if stages is not None:
                # Gradients, and what is added to them, lie next to the parameters; new state is written over the old.
                state[stages[0]] += self._bytes(v) * (3 if roles[v.key] == "parameter" else 1)
        for v, layer in self._forward():
            if any(u.phase == "backward" for u in v.uses):
                saved[layer] += self._bytes(v)
        # Each layer is taken to need what all of them do that are planned here, which is one alone in `LayerProfiler`.
        passing = max(0.0, memory_of(self.sharding_problem, self.choice).total - float(state.sum() + saved.sum()))
        return LayerCosts(loop_s, once_s, state, saved, np.full(n, passing))

    def recomputed(self, plain: LayerCosts, selected: Selected) -> RecomputationCosts:
        """Changes of costs where the operators of ``selected`` run again."""
        loop_s, saved = plain.loop_s.copy(), np.zeros(self.by_layer.count)
        by_origin: dict[str, float] = defaultdict(float)
        for id, seconds in self.seconds.items():
            origin = self.origin(id)
            if origin is not None:
                by_origin[origin] += seconds / self.count
        for group in selected.groups:
            for id in group.operators:
                layer = self.by_layer.body[id][-1] if group.layer is None else group.layer
                loop_s[layer] += by_origin[id]
        kept = set(selected.saved)
        for v, layer in self._forward():
            origin, _, index = v.key.partition(":")
            if f"{self.origin(origin)}:{index}".removesuffix(":") in kept:
                saved[layer] += self._bytes(v)
        return RecomputationCosts(loop_s, saved)

    def _bytes(self, v: ValueDraft) -> int:
        return self.layouts[v.key].local_bytes(v.type, self.sharding_problem.mesh.sizes)

    def _forward(self) -> Iterator[tuple[ValueDraft, int]]:
        """Values that the loop makes in the forward pass, with their layers."""
        for v in self.sharding_problem.values.values():
            layer = self.layer(v.key) if v.key in self._loops.directly_in else None
            if layer is not None and v.key in self.layouts and not v.alias and v.phase != "backward":
                yield v, layer


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
        self.problem.spend()
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
