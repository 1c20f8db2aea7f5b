"""Shardings of layers without a memory limit, and what each layer of them costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from autopar.cluster import Cluster, LogicalMesh
from autopar.ir import Layout
from autopar.recompute import Selected
from autopar.search.intra import ShardingProblem
from autopar.search.intra.collectives import collectives
from autopar.search.intra.draft import ValueDraft
from autopar.search.intra.extract import copy_layouts, memory_of, value_layouts
from autopar.search.intra.stage_loops import StageLoops
from autopar.search.job import Solving
from autopar.search.mesh_search import MeshSearch
from autopar.search.parallel import SERIAL, Future, WorkerPool
from autopar.search.problem import Problem, Reporting
from autopar.search.problem_data import key_without_room
from autopar.search.profiling.layer_costs import LayerCosts, RecomputationCosts
from autopar.search.source import Sliced
from autopar.search.store import Key, count_once
from autopar.solver import Solution
from autopar.solver.goal import Goal
from autopar.stages import StageMap


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
    look = meshes.look(sharding_problem)
    if look is not None and Goal(problem.policy.effort.sharding_gap).reached(look.objective, look.lower_bound):
        return sharding_problem, look
    return sharding_problem, meshes.unlimited(sharding_problem, look)


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
