"""Costs of all runs of layers, composed from those of single layers.

Of layers that are alike one is cut out and sharded by the integer program on each kind of submesh; a stage of layers
i..j costs what its layers cost together, and what its boundaries send. So nothing is solved, compiled or measured per
candidate, and a model of equal layers takes no longer than one of few; the stages that are chosen are planned exactly
afterwards. `layer_costs` has the same from one plan of the whole model, for strategies that profile on one device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import CostModel, send_s
from autopar.ir import Layout
from autopar.ir.phases import LOOP
from autopar.recompute import Level, Phases, Selected, select
from autopar.search.beside import ALONE, Beside, Promise
from autopar.search.inter.dp import StageCosts
from autopar.search.inter.stages import levels_of
from autopar.search.inter.submesh import Submesh
from autopar.search.intra import ShardingProblem, build
from autopar.search.intra.collectives import collectives
from autopar.search.intra.draft import ValueDraft
from autopar.search.intra.extract import copy_layouts, made_layouts, memory_of
from autopar.search.problem import Problem, Reporting
from autopar.search.source import Sliced, StageSource
from autopar.solver import HighsSolver, Solution, Status, solve
from autopar.stages import Layers, StageMap


@dataclass(frozen=True)
class Anew:
    """A level of recomputation: ``loop_s`` and ``activation_bytes`` as in `LayerCosts`."""

    loop_s: np.ndarray
    activation_bytes: np.ndarray


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs on one kind of submesh; arrays by layer.

    Args:
        loop_s: seconds of one microbatch, forward and backward.
        once_s: seconds of what is done once a step.
        state_bytes: bytes a device of parameters, optimizer state, accumulated gradients and what is added to them.
        activation_bytes: bytes a device that one microbatch in flight keeps.
        passing_bytes: bytes a device that the pass of one microbatch needs besides.
        anew: what computing anew changes, by level.
    """

    loop_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    activation_bytes: np.ndarray
    passing_bytes: np.ndarray
    anew: Mapping[Level, Anew] = field(default_factory=dict)

    def way(self, level: Level) -> Anew:
        """Seconds of one microbatch and bytes that it keeps at a level of recomputation."""
        return Anew(self.loop_s, self.activation_bytes) if level == "none" else self.anew[level]


class Prices(Protocol):
    """Costs of the layers of one step in one number of microbatches, however they are known."""

    @property
    def problem(self) -> Problem:
        """What is planned."""

    @property
    def layers(self) -> Layers:
        """Of the step."""

    @property
    def count(self) -> int:
        """Number of microbatches."""

    def part(self, submesh: Submesh) -> Cluster:
        """A submesh of that kind."""

    def on(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        """Costs of all layers on a kind of submesh, and the sizes of the axes of the logical mesh that they are of."""


class LayerPrices:
    """Costs of the layers of one step in one number of microbatches; remembers those that it was asked for.

    Args:
        problem: what is planned; its memory limit is that of a device.
        source: the step.
        count: number of microbatches.
        layers: of the step.
        beside: solves some of them.
    """

    def __init__(
        self, problem: Problem, source: StageSource, count: int, layers: Layers, beside: Beside = ALONE
    ) -> None:
        self.beside = beside
        self.problem, self.source, self.count, self.layers = problem, source, count, layers
        alike = layers.alike or tuple(range(len(layers.members)))
        by_kind: dict[int, list[int]] = {}
        for n, first in enumerate(alike):
            by_kind.setdefault(first, []).append(n)
        # One from the middle: the first and last of their kind may have work of the whole step beside their own.
        self.chosen = {members[len(members) // 2]: members for members in by_kind.values()}
        # The step is cut around all of them at once: every cut is a walk over the whole step.
        self.cut: list[list[str]] = []
        self.stages: dict[int, int] = {}
        for n, members in enumerate(layers.members):
            if n in self.chosen or n == 0 or n - 1 in self.chosen:
                self.cut.append([])
            if n in self.chosen:
                self.stages[n] = len(self.cut) - 1
            self.cut[-1] += members
        self.known: dict[Submesh, tuple[LayerCosts, tuple[int, ...]]] = {}
        self.selected: dict[tuple[int, Level], Selected] = {}

    def part(self, submesh: Submesh) -> Cluster:
        """A submesh of that kind."""
        cluster = self.problem.cluster
        return cluster.part(cluster.group_starts[submesh.group], submesh.size)

    def on(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        """Costs of all layers on a kind of submesh, and the sizes of the axes of the logical mesh that they are of."""
        if submesh not in self.known:
            self.known[submesh] = self._priced(submesh)
        return self.known[submesh]

    def _priced(self, submesh: Submesh) -> tuple[LayerCosts, tuple[int, ...]]:
        self.problem.checkpoint()
        part, n = self.part(submesh), len(self.layers.members)
        self.problem.log(f"pricing {n} layers, {len(self.chosen)} of them different, on {part}")
        flops = self.layers.flops
        shape = self.problem.options.mesh_shape
        if shape is not None and math.prod(shape) != submesh.size:
            shape = None
        levels = [level for level in levels_of(self.problem) if level != "none"]
        plain = [np.zeros(n) for _ in range(5)]
        anew: dict[Level, Anew] = {level: Anew(np.zeros(n), np.zeros(n)) for level in levels}
        # The layers that do most of the work decide the mesh: those of a stage are on one.
        heaviest, *others = sorted(self.chosen, key=lambda n: (-flops[n] * len(self.chosen[n]), n))
        deciding = _Solving.of(self.problem, part, self._piece(heaviest), self.count, shape, self.beside)
        pieces = {layer: self._piece(layer) for layer in others}  # cut out while the first is solved beside
        first = deciding.solved()
        shape = tuple(n for _, n in first.stated.mesh.axes)
        solving = {
            n: _Solving.of(self.problem, part, piece, self.count, shape, self.beside) for n, piece in pieces.items()
        }
        for layer, solved in [(heaviest, first), *((n, s.solved()) for n, s in solving.items())]:
            costs, at = solved.costs(), self.stages[layer]
            members = self.chosen[layer]
            found = (costs.loop_s, costs.once_s, costs.state_bytes, costs.activation_bytes, costs.passing_bytes)
            for target, values in zip(plain, found, strict=True):
                target[members] = values[at]
            for level in levels:
                way = solved.anew(costs, self._selected(layer, level, solved.whole))
                anew[level].loop_s[members] = way.loop_s[at]
                anew[level].activation_bytes[members] = way.activation_bytes[at]
        assert shape is not None
        return LayerCosts(plain[0], plain[1], plain[2], plain[3], plain[4], anew), shape

    def _piece(self, layer: int) -> Sliced:
        """A layer cut out of the step."""
        return self.source.piece(self.count, self.cut, self.stages[layer])

    def _selected(self, layer: int, level: Level, piece: Sliced) -> Selected:
        """What a level of recomputation means for a layer alone."""
        key = (layer, level)
        if key not in self.selected:
            graph, (parts,) = self.problem.graph, piece.parts
            phases = Phases.of(graph, parts.body, parts.backward)
            own: list[tuple[str, ...]] = [() for _ in range(piece.map.count)]
            own[parts.stage] = self.layers.members[layer]
            self.selected[key] = select(graph, phases, own, level)
        return self.selected[key]


def stage_costs(prices: Prices, kinds: Sequence[Submesh]) -> StageCosts:
    """Costs of all runs of layers on each kind of submesh.

    Args:
        prices: of the layers.
        kinds: of submeshes.
    """
    problem, layers, count = prices.problem, prices.layers, prices.count
    n = len(layers.members)
    shape = (len(kinds), n, n)
    levels = levels_of(problem)
    by_level = [tuple(np.full(shape, np.inf) for _ in range(3)) for _ in levels]
    cuts = np.array([0.0, *layers.cut_bytes])
    for kind, submesh in enumerate(kinds):
        costs, _ = prices.on(submesh)
        sends = boundary_s(problem.cluster, submesh, layers)
        once, state = _sums(costs.once_s / count), _sums(costs.state_bytes)
        for level, (seconds, fixed, held) in zip(levels, by_level, strict=True):
            way = costs.way(level)
            loop, kept = _sums(way.loop_s), _sums(way.activation_bytes)
            # The layer whose pass runs is there as a whole.
            whole_layer = np.maximum(0.0, costs.activation_bytes - way.activation_bytes) + costs.passing_bytes
            for first in range(n):
                last = np.arange(first, n)
                beside = once[last + 1] - once[first] + sends[first] + sends[last + 1]
                seconds[kind, first, last] = loop[last + 1] - loop[first] + beside
                fixed[kind, first, last] = state[last + 1] - state[first] + np.maximum.accumulate(whole_layer[first:])
                held[kind, first, last] = kept[last + 1] - kept[first] + cuts[first] / submesh.size
    sizes, groups = tuple(k.size for k in kinds), tuple(k.group for k in kinds)
    ways = [StageCosts(sizes, seconds, fixed, held, groups) for seconds, fixed, held in by_level]
    return replace(ways[0], others=tuple(ways[1:]))


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
    return _Solving.of(problem, part, whole, count).solved(by_layer).costs()


@dataclass(frozen=True)
class _Solving:
    """A step, or a part of it, that is being planned on the logical meshes of a submesh.

    Args:
        problem: it as one stage.
        whole: where its operators are from.
        count: number of microbatches.
        answers: for each mesh, its choice problem and the answer.
    """

    problem: Problem
    whole: Sliced
    count: int
    answers: tuple[Promise[tuple[ShardingProblem, Solution]], ...]

    @staticmethod
    def of(
        problem: Problem,
        part: Cluster,
        whole: Sliced,
        count: int,
        shape: tuple[int, ...] | None = None,
        beside: Beside = ALONE,
    ) -> _Solving:
        """Begins on all logical meshes of ``part``, or on that of ``shape``."""
        single = replace(problem, graph=whole.graphs[0], cluster=part, cost_model=CostModel(part))
        silent = replace(single, reporting=Reporting(), source=None, anytime=None)
        answers = tuple(beside.promise(_without_limit, silent, mesh) for mesh in part.logical_meshes(shape))
        return _Solving(single, whole, count, answers)

    def solved(self, by_layer: StageMap | None = None) -> _Solved:
        """The cheapest; by the layers of ``by_layer``, or of the whole."""
        found = [a for a in (promise.result() for promise in self.answers) if a[1].found]
        assert found, "without a memory limit there is always a choice"
        stated, answer = min(found, key=lambda a: a[1].objective)
        return _Solved(self.problem, stated, answer.choice, self.whole, by_layer or self.whole.map, self.count)


def _without_limit(problem: Problem, mesh: LogicalMesh) -> tuple[ShardingProblem, Solution]:
    """The choice problem of one stage on a mesh, and the cheapest choice if memory were free.

    A number of nodes, and no clock, ends the search: costs of layers are the same on a loaded machine.
    """
    stated = build(problem, mesh, split_phases=False)
    free = replace(stated.problem, limit_bytes=None)
    solution = solve(free, HighsSolver(max_nodes=problem.policy.pricing.most_nodes))
    return stated, solve(free) if solution.status is Status.UNKNOWN else solution


@dataclass(frozen=True)
class _Solved:
    """A plan of the whole model, or of a part of it, on a submesh, by layer.

    Args:
        problem: the model as one stage.
        stated: its choice problem.
        choice: the answer.
        whole: where the stage's operators are from.
        by_layer: layers of the step's operators.
        count: number of microbatches.
    """

    problem: Problem
    stated: ShardingProblem
    choice: Sequence[int]
    whole: Sliced
    by_layer: StageMap
    count: int

    @cached_property
    def made(self) -> Mapping[str, Layout]:
        """Layout of every value."""
        return made_layouts(self.stated, self.choice)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds a step by operator of the stage's graph, collectives before it included."""
        found: dict[str, float] = defaultdict(float)
        for s in self.stated.sites:
            found[s.id] += float(s.seconds[self.choice[s.node]])
        copies = copy_layouts(self.stated, self.choice, self.made)
        for c in collectives(self.problem, self.stated, self.choice, self.made, copies):
            found[c.use.consumer] += c.seconds
        return found

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
        """What each layer costs where nothing is computed anew."""
        n = self.by_layer.count
        roles = {i.name: i.role for i in self.problem.graph.inputs}
        loop_s, once_s, state, held = (np.zeros(n) for _ in range(4))
        for id, seconds in self.seconds.items():
            layer, inside = self.layer(id), id.startswith(f"{LOOP}/")
            target, amount = (loop_s, seconds / self.count) if inside else (once_s, seconds)
            if layer is None:
                target += amount / n  # joins of contributions, and what belongs to no operator of the step
            else:
                target[layer] += amount
        for v in self.stated.values.values():
            stages = self.by_layer.inputs.get(v.source) if v.source and v.key in self.made and not v.alias else None
            if stages is not None:
                # Gradients, and what is added to them, lie beside the parameters; new state is written over the old.
                state[stages[0]] += self._bytes(v) * (3 if roles[v.key] == "parameter" else 1)
        for v, layer in self._forward():
            if any(u.phase == "backward" for u in v.uses):
                held[layer] += self._bytes(v)
        # Each layer is taken to need what all of them do that are planned here, which is one alone in `LayerPrices`.
        passing = max(0.0, memory_of(self.stated, self.choice).total - float(state.sum() + held.sum()))
        return LayerCosts(loop_s, once_s, state, held, np.full(n, passing))

    def anew(self, plain: LayerCosts, selected: Selected) -> Anew:
        """What changes where the operators of ``selected`` run again."""
        loop_s, held = plain.loop_s.copy(), np.zeros(self.by_layer.count)
        by_origin: dict[str, float] = defaultdict(float)
        for id, seconds in self.seconds.items():
            origin = self.origin(id)
            if origin is not None:
                by_origin[origin] += seconds / self.count
        for group in selected.again:
            for id in group.operators:
                layer = self.by_layer.body[id][-1] if group.layer is None else group.layer
                loop_s[layer] += by_origin[id]
        kept = set(selected.held)
        for v, layer in self._forward():
            origin, _, index = v.key.partition(":")
            if f"{self.origin(origin)}:{index}".removesuffix(":") in kept:
                held[layer] += self._bytes(v)
        return Anew(loop_s, held)

    def _bytes(self, v: ValueDraft) -> int:
        return self.made[v.key].local_bytes(v.type, self.stated.mesh.sizes)

    def _forward(self) -> Iterator[tuple[ValueDraft, int]]:
        """Values that the loop makes in the forward pass, with their layers."""
        for v in self.stated.values.values():
            inside = v.key.startswith(f"{LOOP}/") and v.key.count("/body/") == 1
            layer = self.layer(v.key) if inside else None
            if layer is not None and v.key in self.made and not v.alias and v.phase != "backward":
                yield v, layer
