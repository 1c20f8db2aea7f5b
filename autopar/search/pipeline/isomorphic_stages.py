"""`StagePlanner`: plans one stage of each isomorphism class, and renames its plan for the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import msgspec

from autopar.cluster import Cluster
from autopar.errors.names import counted
from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.plan import Plan, PlanContent
from autopar.search.outcome import Bounded
from autopar.search.problem import Problem
from autopar.search.problem_data import PlannedBy, key_of_plan, room_of
from autopar.search.store import Key, Room, Same
from autopar.search.worker_pool import SERIAL, Future, WorkerPool
from autopar.solver.meter import Meter


@dataclass
class StagePlanner:
    """Plans of the stages of one candidate, which are kept in the store of the search.

    Args:
        intra: plans one stage on its submesh.
        meshes: by stage the shape of the logical mesh that is tried first; empty where none is better known.
        pool: plans some of them.
        submitted: stages whose plans are submitted to the pool.
        any_that_fits: whether the plan of an isomorphic stage is taken where it fits, though another might be faster.
        relaxed: whether plans are relaxations, which pad nothing.
        candidate: identity of the candidate, whose stages alone may take any plan that fits.
    """

    intra: Callable[[Problem], Plan | Bounded]
    meshes: tuple[tuple[int, ...], ...] = ()
    pool: WorkerPool = SERIAL
    submitted: dict[tuple[Key, Room], Future[Plan | Bounded]] = field(default_factory=dict)
    any_that_fits: bool = False
    relaxed: bool = False
    candidate: Same = field(default_factory=lambda: Same(object()))

    def submit(self, stage_problem: Problem) -> None:
        """Submits a stage to the pool, as it will be asked for."""
        silent = replace(stage_problem, reporting=replace(stage_problem.reporting, log=None), anytime=None)
        self.submitted[self._key(stage_problem), room_of(stage_problem)] = self.pool.submit(self.intra, silent)

    def plan(self, stage_problem: Problem, what: str) -> PlanContent | Bounded:
        """The best plan of a stage: that of an equal stage, or a new one.

        `Bounded` where it takes the ``cutoff_s`` of the problem or more, or an equal stage does.

        Args:
            stage_problem: the stage as a problem of its own.
            what: the stage in words.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        key, room, store, meter = (
            self._key(stage_problem),
            room_of(stage_problem),
            stage_problem.store,
            stage_problem.meter,
        )
        gap = stage_problem.policy.effort.gap
        known = store.known(key, room, meter, taker=self.candidate, any_that_fits=self.any_that_fits, gap=gap)
        if known is not None:
            return known
        operators = len(stage_problem.graph.operators)
        stage_problem.log(f"planning {what}: {counted(operators, 'operator')} on {stage_problem.cluster}")
        stage_problem.checkpoint()
        stage_problem.spend()
        submitted = self.submitted.get((key, room))

        def planned(meter: Meter) -> PlanContent | Bounded:
            counted = replace(stage_problem, meter=meter)
            plan = self.intra(counted) if submitted is None else submitted.result(meter)
            return plan if isinstance(plan, Bounded) else plan.content

        return store.planned(key, room, stage_problem.meter, planned, self.candidate)

    def busy_key(self, problem: Problem, graph: Graph, part: Cluster, count: int) -> Key:
        """Key of the busy seconds of a stage whatever its schedule.

        Args:
            problem: the whole.
            graph: of the stage.
            part: its devices.
            count: microbatches.
        """
        return self._key(replace(problem, graph=graph, cluster=part), "busy", count)

    def _key(self, problem: Problem, *more: Hashable) -> Key:
        return key_of_plan(problem, PlannedBy(self.intra), *more)


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
