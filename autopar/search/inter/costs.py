"""Costs of all runs of layers, composed from plans of the whole model.

For each kind of submesh the integer program of the whole model is solved once on it. Its operators, with their
seconds, collectives and bytes, belong to layers; a stage of layers i..j costs what its layers cost together, and what
its boundaries send. So layers of a stage are sharded as they would be in the whole model, and nothing is
solved, compiled or measured per candidate; the stages that are chosen are planned exactly afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster, NodeGroup
from autopar.cost import CostModel
from autopar.ir import Layout
from autopar.ir.phases import LOOP
from autopar.search.inter.dp import StageCosts
from autopar.search.inter.submesh import Submesh
from autopar.search.intra import ShardingProblem, build
from autopar.search.intra.extract import collectives, copy_layouts, made_layouts
from autopar.search.problem import Problem
from autopar.search.source import Sliced, StageSource
from autopar.solver import Solution, solve
from autopar.stages import Layers, StageMap, assign


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs on one kind of submesh; arrays by layer.

    Args:
        loop_s: seconds of one microbatch, forward and backward.
        once_s: seconds of what is done once a step.
        state_bytes: bytes a device of parameters, optimizer state and accumulated gradients.
        held_bytes: bytes a device that one microbatch in flight keeps.
    """

    loop_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    held_bytes: np.ndarray


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
    seconds, fixed, held = (np.full(shape, np.inf) for _ in range(3))
    for kind, submesh in enumerate(kinds):
        part = problem.cluster.part(problem.cluster.group_starts[submesh.group], submesh.size)
        costs = layer_costs(problem, part, whole, by_layer, count)
        sends = boundary_s(problem.cluster.groups[submesh.group], part, layers)
        for first in range(n):
            for last in range(first, n):
                run = slice(first, last + 1)
                once = costs.once_s[run].sum()
                crossing = sends[first] + sends[last + 1]
                seconds[kind, first, last] = costs.loop_s[run].sum() + once / count + crossing
                fixed[kind, first, last] = costs.state_bytes[run].sum()
                held[kind, first, last] = costs.held_bytes[run].sum()
    sizes, groups = tuple(k.size for k in kinds), tuple(k.group for k in kinds)
    return StageCosts(sizes, seconds, fixed, held, groups)


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


def layer_costs(problem: Problem, part: Cluster, whole: Sliced, by_layer: StageMap, count: int) -> LayerCosts:
    """Costs by layer on the submesh ``part``, from the best plan of the whole model on it."""
    cost = CostModel(part)
    single = replace(problem, graph=whole.graphs[0], cluster=part, cost_model=cost)
    best: tuple[float, ShardingProblem, Solution] | None = None
    for mesh in part.logical_meshes():
        stated = build(single, mesh, split_phases=False)
        answer = solve(replace(stated.problem, limit_bytes=None), time_limit_s=10.0, seed=0)
        if answer.found and (best is None or answer.objective < best[0]):
            best = (answer.objective, stated, answer)
    assert best is not None, "without a memory limit there is always a choice"
    return _by_layer(single, best[1], best[2].choice, whole, by_layer, count)


def _by_layer(
    problem: Problem,
    stated: ShardingProblem,
    choice: Sequence[int],
    whole: Sliced,
    by_layer: StageMap,
    count: int,
) -> LayerCosts:
    n = by_layer.count
    layer_of = _layers_of(whole, by_layer)
    loop_s, once_s, state, held = (np.zeros(n) for _ in range(4))

    def add(id: str, seconds: float) -> None:
        layer = layer_of.get(id.partition(":")[0])
        if id.startswith(f"{LOOP}/"):
            target, amount = loop_s, seconds / count
        else:
            target, amount = once_s, seconds
        if layer is None:
            target += amount / n  # joins of contributions, and what belongs to no operator of the step
        else:
            target[layer] += amount

    for s in stated.sites:
        add(s.id, float(s.seconds[choice[s.node]]))
    made = made_layouts(stated, choice)
    for c in collectives(problem, stated, choice, made, copy_layouts(stated, choice, made)):
        add(c.use.consumer, c.seconds)
    _add_bytes(stated, made, layer_of, by_layer, state, held)
    return LayerCosts(loop_s, once_s, state, held)


def _layers_of(whole: Sliced, by_layer: StageMap) -> dict[str, int]:
    """Layer of each operator of the whole model's stage graph."""
    stages = {**by_layer.update, **by_layer.body}
    return {id: stages[origin][-1] for id, origin in whole.origins[0].items() if origin in stages}


def _add_bytes(
    stated: ShardingProblem,
    made: Mapping[str, Layout],
    layer_of: Mapping[str, int],
    by_layer: StageMap,
    state: np.ndarray,
    held: np.ndarray,
) -> None:
    """Adds up bytes by layer."""
    sizes = stated.mesh.sizes
    for v in stated.values.values():
        if v.key not in made or v.alias:
            continue
        nbytes = made[v.key].local_bytes(v.type, sizes)
        if v.source:
            stages = by_layer.inputs.get(v.source)
            if stages is not None:
                # Gradients accumulate beside the parameters; new optimizer state is written over the old.
                state[stages[0]] += nbytes * 2
            continue
        inside = v.key.startswith(f"{LOOP}/") and v.key.count("/body/") == 1
        layer = layer_of.get(v.key.partition(":")[0])
        if inside and layer is not None and v.phase != "backward" and any(u.phase == "backward" for u in v.uses):
            held[layer] += nbytes
