"""`StagePlanner`: of isomorphic stages one is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.plan import Plan, PlanContent
from autopar.search.outcome import Bounded
from autopar.search.parallel import SERIAL, Future, WorkerPool
from autopar.search.problem import Problem
from autopar.simulate.memory import lasting_bytes


@dataclass(frozen=True)
class _Planned:
    """A plan of a stage's graph that is the best within ``limit_bytes`` with so many extra microbatches in flight."""

    graph: Graph
    limit_bytes: float
    extra_in_flight: int
    content: PlanContent


@dataclass(frozen=True)
class _Slower:
    """A proof that no plan within ``limit_bytes``, with so many extra microbatches in flight, takes less than
    ``cutoff_s``.
    """

    limit_bytes: float
    extra_in_flight: int
    cutoff_s: float
    bounded: Bounded


#: Plans of stages by what they are of.
StagePlanCache: TypeAlias = dict[tuple[object, ...], list[_Planned]]


@dataclass
class StagePlanner:
    """Plans of the stages of one candidate.

    Args:
        intra: plans one stage on its submesh.
        meshes: by stage the shape of the logical mesh that is tried first; empty where none is better known.
        pool: plans some of them.
        cache: plans by what they are of.
        submitted: stages whose plans are submitted to the pool.
        slower: by what they are of, stages that take longer than a plan at hand.
        any_that_fits: whether the plan of an isomorphic stage is taken where it fits, though another might be faster.
        looks: whether plans are looks, which pad nothing.
    """

    intra: Callable[[Problem], Plan | Bounded]
    meshes: tuple[tuple[int, ...], ...] = ()
    pool: WorkerPool = SERIAL
    cache: StagePlanCache = field(default_factory=dict)
    submitted: list[tuple[Problem, Future[Plan | Bounded]]] = field(default_factory=list)
    slower: dict[tuple[object, ...], list[_Slower]] = field(default_factory=dict)
    any_that_fits: bool = False
    looks: bool = False

    def submit(self, stage_problem: Problem) -> None:
        """Submits a stage to the pool, as it will be asked for."""
        self.submitted.append((stage_problem, self.pool.submit(self.intra, _silent(stage_problem))))

    def plan(self, stage_problem: Problem, kind: tuple[object, ...], what: str) -> PlanContent | Bounded:
        """The best plan of a stage: that of an isomorphic stage, or a new one.

        `Bounded` where it takes the ``cutoff_s`` of the problem or more, or an isomorphic stage does.

        Args:
            stage_problem: the stage as a problem of its own.
            kind: equal for stages whose graphs differ in names of inputs and outputs alone.
            what: the stage in words.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        limit, extra_in_flight, graph = (
            stage_problem.memory_limit_bytes,
            stage_problem.subproblem.extra_in_flight,
            stage_problem.graph,
        )
        key = (kind, stage_problem.cluster.to_json(), stage_problem.job.mesh_shape)
        cached, slower = self.cache.setdefault(key, []), self.slower.setdefault(key, [])
        for k in cached:
            # What is the best within more, and needs no more than this, is the best within this.
            planned = k.content.stages[0]
            others_bytes = stage_problem.subproblem.other_stages * lasting_bytes(planned)
            needed = k.content.peak_memory + extra_in_flight * planned.activation_bytes + others_bytes
            is_best = limit <= k.limit_bytes and extra_in_flight >= k.extra_in_flight
            if needed <= limit and (is_best or self.any_that_fits):
                return k.content if k.graph is graph else renamed_content(k.content, k.graph, graph)
        cutoff_s = stage_problem.subproblem.cutoff_s
        for s in slower:
            # What takes as long within more takes as long within this.
            if limit <= s.limit_bytes and extra_in_flight >= s.extra_in_flight and cutoff_s <= s.cutoff_s:
                return s.bounded
        stage_problem.log(f"planning {what}: {len(graph.operators)} operators on {stage_problem.cluster}")
        stage_problem.checkpoint()
        submitted = next((future for other, future in self.submitted if _is_same(stage_problem, other)), None)
        plan = self.intra(stage_problem) if submitted is None else submitted.result(stage_problem.meter)
        if isinstance(plan, Bounded):
            slower.append(_Slower(limit, extra_in_flight, cutoff_s, plan))
            return plan
        cached.append(_Planned(graph, limit, extra_in_flight, plan.content))
        return plan.content


@dataclass
class CachedPlanner:
    """A planner of stages that remembers: candidates have stages in common.

    Args:
        intra: plans one stage on its submesh.
        cache: plans and errors by what they are of.
    """

    intra: Callable[[Problem], Plan | Bounded]
    cache: dict[tuple[object, ...], Plan | Bounded | InfeasiblePlanError] = field(default_factory=dict)

    def __call__(self, problem: Problem) -> Plan | Bounded:
        """The plan of a stage."""
        graph = problem.graph
        ids = tuple(op.id for op in graph.operators)
        key = (graph.name, fingerprint(graph), ids, problem.cluster.to_json(), problem.job, problem.subproblem)
        if key not in self.cache:
            try:
                self.cache[key] = self.intra(problem)
            except InfeasiblePlanError as error:
                self.cache[key] = error
        plan = self.cache[key]
        if isinstance(plan, InfeasiblePlanError):
            raise plan
        return plan


def _is_same(one: Problem, other: Problem) -> bool:
    return (
        one.graph is other.graph
        and one.job == other.job
        and one.subproblem == other.subproblem
        and one.cluster == other.cluster
    )


def _silent(problem: Problem) -> Problem:
    """The problem without who listens, which no other process can call."""
    return replace(problem, reporting=replace(problem.reporting, log=None), anytime=None)


def renamed_content(content: PlanContent, old: Graph, new: Graph) -> PlanContent:
    """The plan of a graph as that of one that is the same but for names of inputs and paths of outputs.

    Args:
        content: of ``old``.
        old, new: inputs and outputs in the same order, operators with the same ids.
    """
    names = {i.name: j.name for i, j in zip(old.inputs, new.inputs, strict=True)}
    paths = {a.path: b.path for a, b in zip(old.outputs, new.outputs, strict=True)}
    names.update({f"result{a}": f"result{b}" for a, b in paths.items()})

    def name_of(name: str) -> str:
        return names.get(name, name)

    def note_of(note: str) -> str:
        return " ".join(map(name_of, note.split(" ")))

    stages = tuple(
        msgspec.structs.replace(
            s,
            collectives=tuple(
                msgspec.structs.replace(c, operators=tuple(map(name_of, c.operators))) for c in s.collectives
            ),
        )
        for s in content.stages
    )
    return msgspec.structs.replace(
        content,
        program=new.name,
        fingerprint=fingerprint(new),
        stages=stages,
        inputs=tuple(msgspec.structs.replace(r, path=names[r.path]) for r in content.inputs),
        outputs=tuple(
            msgspec.structs.replace(r, path=paths[r.path], updates=None if r.updates is None else names[r.updates])
            for r in content.outputs
        ),
        copies=tuple(msgspec.structs.replace(c, value=name_of(c.value)) for c in content.copies),
        choices=tuple(
            msgspec.structs.replace(c, name=name_of(c.name), members=tuple(map(name_of, c.members)))
            for c in content.choices
        ),
        notes=tuple(map(note_of, content.notes)),
        donated=tuple(names[n] for n in content.donated),
    )
