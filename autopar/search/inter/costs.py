"""Costs of all runs of layers, composed from plans of the whole model.

For each kind of submesh the integer program of the whole model is solved once on it. Its operators, with their
seconds, collectives and bytes, belong to layers; a stage of layers i..j costs what its layers cost together, and what
its boundaries send. So layers of a stage are sharded as they would be in the whole model, and nothing is
solved, compiled or measured per candidate; the stages that are chosen are planned exactly afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.cluster import Cluster, NodeGroup
from autopar.cost import CostModel
from autopar.ir import Layout
from autopar.ir.phases import LOOP
from autopar.recompute import Level, Phases, Selected, select
from autopar.search.inter.dp import StageCosts
from autopar.search.inter.stages import levels_of
from autopar.search.inter.submesh import Submesh
from autopar.search.intra import ShardingProblem, build
from autopar.search.intra.draft import ValueDraft
from autopar.search.intra.extract import collectives, copy_layouts, made_layouts
from autopar.search.problem import Problem
from autopar.search.source import Sliced, StageSource
from autopar.solver import Solution, solve
from autopar.stages import Layers, StageMap, assign


@dataclass(frozen=True)
class Anew:
    """A level of recomputation: ``loop_s`` and ``held_bytes`` as in `LayerCosts`."""

    loop_s: np.ndarray
    held_bytes: np.ndarray


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs on one kind of submesh; arrays by layer.

    Args:
        loop_s: seconds of one microbatch, forward and backward.
        once_s: seconds of what is done once a step.
        state_bytes: bytes a device of parameters, optimizer state and accumulated gradients.
        held_bytes: bytes a device that one microbatch in flight keeps.
        anew: what computing anew changes, by level.
    """

    loop_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    held_bytes: np.ndarray
    anew: Mapping[Level, Anew] = field(default_factory=dict)

    def way(self, level: Level) -> Anew:
        """Seconds of one microbatch and bytes that it keeps at a level of recomputation."""
        return Anew(self.loop_s, self.held_bytes) if level == "none" else self.anew[level]


def stage_costs(
    problem: Problem, source: StageSource, count: int, layers: Layers, kinds: Sequence[Submesh]
) -> StageCosts:
    """Costs of all runs of ``layers`` on each kind of submesh.

    Args:
        problem: what is planned; its memory limit is that of a device.
        source: the step.
        count: number of microbatches.
        layers: of the step.
        kinds: of submeshes.
    """
    found = source.microbatches(count)
    n = len(layers.members)
    by_layer = assign(problem.graph, found, layers, range(1, n + 1))
    whole = source.slice(count, [[id for layer in layers.members for id in layer]])
    shape = (len(kinds), n, n)
    levels = levels_of(problem)
    by_level = [tuple(np.full(shape, np.inf) for _ in range(3)) for _ in levels]
    cuts = np.array([0.0, *layers.cut_bytes])
    for kind, submesh in enumerate(kinds):
        part = problem.cluster.part(problem.cluster.group_starts[submesh.group], submesh.size)
        costs = layer_costs(problem, part, whole, by_layer, count, layers)
        sends = boundary_s(problem.cluster.groups[submesh.group], part, layers)
        for first in range(n):
            for last in range(first, n):
                run = slice(first, last + 1)
                beside = costs.once_s[run].sum() / count + sends[first] + sends[last + 1]
                received = cuts[first] / submesh.size
                for level, (seconds, fixed, held) in zip(levels, by_level, strict=True):
                    way = costs.way(level)
                    seconds[kind, first, last] = way.loop_s[run].sum() + beside
                    # The layer whose backward pass runs is there as a whole.
                    whole_layer = (costs.held_bytes[run] - way.held_bytes[run]).max()
                    fixed[kind, first, last] = costs.state_bytes[run].sum() + max(0.0, whole_layer)
                    held[kind, first, last] = way.held_bytes[run].sum() + received
    sizes, groups = tuple(k.size for k in kinds), tuple(k.group for k in kinds)
    ways = [StageCosts(sizes, seconds, fixed, held, groups) for seconds, fixed, held in by_level]
    return replace(ways[0], others=tuple(ways[1:]))


def boundary_s(group: NodeGroup, part: Cluster, layers: Layers) -> np.ndarray:
    """Seconds in which a stage sends the activations of one microbatch across each cut; cotangents take as long."""
    link = group.intra
    sharing = 1.0
    if part.num_devices * 2 > group.devices_per_node and not isinstance(group.inter, str):
        link = group.inter
        lanes = min(part.num_devices, group.devices_per_node)
        if link.node_bandwidth is not None:
            sharing = min(1.0, link.node_bandwidth / (lanes * link.bandwidth))
    cuts = np.array([0.0, *layers.cut_bytes, 0.0])
    seconds = cuts / part.num_devices / (link.bandwidth * link.efficiency * sharing) + link.latency_s
    return np.where(cuts > 0, seconds, 0.0)


def layer_costs(
    problem: Problem, part: Cluster, whole: Sliced, by_layer: StageMap, count: int, layers: Layers | None = None
) -> LayerCosts:
    """Costs by layer on the submesh ``part``, from the best plan of the whole model on it.

    Args:
        problem: what is planned.
        part: the submesh.
        whole: the step as one stage.
        by_layer: layers of all operators.
        count: number of microbatches.
        layers: operators of the forward pass by layer, where costs of computing them anew are asked for.
    """
    cost = CostModel(part)
    single = replace(problem, graph=whole.graphs[0], cluster=part, cost_model=cost)
    best: tuple[float, ShardingProblem, Solution] | None = None
    for mesh in part.logical_meshes():
        stated = build(single, mesh, split_phases=False)
        answer = solve(replace(stated.problem, limit_bytes=None), time_limit_s=10.0, seed=0)
        if answer.found and (best is None or answer.objective < best[0]):
            best = (answer.objective, stated, answer)
    assert best is not None, "without a memory limit there is always a choice"
    solved = _Solved(single, best[1], best[2].choice, whole, by_layer, count)
    found = solved.costs()
    if layers is None:
        return found
    anew: dict[Level, Anew] = {}
    for level in levels_of(problem):
        if level != "none":
            phases = Phases.of(problem.graph, whole.map.found.body, by_layer.backward)
            anew[level] = solved.anew(found, select(problem.graph, phases, layers.members, level))
    return replace(found, anew=anew)


@dataclass(frozen=True)
class _Solved:
    """A plan of the whole model on a submesh, by layer.

    Args:
        problem: the whole model as one stage.
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
                # Gradients accumulate beside the parameters; new optimizer state is written over the old.
                state[stages[0]] += self._bytes(v) * 2
        for v, layer in self._forward():
            if any(u.phase == "backward" for u in v.uses):
                held[layer] += self._bytes(v)
        return LayerCosts(loop_s, once_s, state, held)

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
