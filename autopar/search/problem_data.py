"""A problem as plain data: all that its plan depends on but its graph.

Keys of answers of a search (`autopar.search.store`) and of plans on disk (`autopar.search.cache.key`) are made of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import ScheduleError
from autopar.schedule import factory_named
from autopar.search.job import Job, Request, Solving
from autopar.search.plain_data import NotPlainError, is_own, plain_data
from autopar.search.policy import EffortPolicy, SearchPolicy, StagePolicy, WorkerPolicy
from autopar.search.problem import Problem, Subproblem
from autopar.search.store import Key, Room
from autopar.solver.meter import Meter

Value = TypeVar("Value")


@dataclass(frozen=True)
class Conditions:
    """Everything that a plan depends on but its graph; fields as those of `Problem`."""

    cluster: Cluster
    cost_model: CostModel
    request: Request
    job: Job
    solving: Solving
    subproblem: Subproblem
    policy: SearchPolicy

    @staticmethod
    def of(problem: Problem) -> Conditions:
        """Conditions of a problem."""
        p = problem
        return Conditions(p.cluster, p.cost_model, p.request, p.job, p.solving, p.subproblem, p.policy)

    def data(self) -> dict[str, Any]:
        """Data for JSON.

        Raises:
            NotPlainError: something of it is a user's own.
            ScheduleError: no schedule has the name that is asked for.
        """
        return {
            "cluster": _cluster_data(self.cluster),
            "cost_model": _cost_model_data(self.cost_model),
            "request": plain_data(self.request),
            "job": _job_data(self.job),
            "solving": plain_data(self.solving),
            "subproblem": plain_data(self.subproblem),
            "policy": plain_data(_deciding(self.policy)),
        }

    @cached_property
    def digest(self) -> str | None:
        """A hash that is the same in every process; None where something is a user's own."""
        try:
            data = self.data()
        except (NotPlainError, ScheduleError):
            return None
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]

    def __hash__(self) -> int:
        return hash((self.cluster.num_devices, self.job.num_microbatches, self.subproblem))


@dataclass(frozen=True)
class PlannedBy:
    """A planner of stages, as a part of a key."""

    planner: Callable[[Problem], Any]

    @cached_property
    def digest(self) -> str | None:
        """A hash that is the same in every process; None where it is a user's own."""
        try:
            data = plain_data(getattr(self.planner, "planner", self.planner))
        except NotPlainError:
            return None
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]

    def __hash__(self) -> int:
        try:
            return hash(self.planner)
        except TypeError:
            return id(self.planner)


def in_any_room(problem: Problem) -> Conditions:
    """Conditions of answers that hold within any memory limit, and for any number of microbatches in flight above 0."""
    known = Conditions.of(problem)
    # What may lie in host memory is measured by the limit.
    limit = None if problem.job.offload == "none" else problem.memory_limit_bytes
    subproblem = replace(
        known.subproblem,
        cutoff_s=math.inf,
        tried_stages=None,
        first_count=0,
        ample_memory=False,
        extra_in_flight=min(1, known.subproblem.extra_in_flight),
    )
    return replace(known, job=replace(known.job, memory_limit_bytes=limit), subproblem=subproblem)


def key_of_plan(problem: Problem, *more: Hashable) -> Key:
    """Key of the plans of a problem in any room.

    Args:
        problem: what is planned.
        more: what plans it.
    """
    known = in_any_room(problem)
    job = replace(known.job, memory_limit_bytes=None)
    subproblem = replace(known.subproblem, extra_in_flight=0, other_stages=0)
    return problem.store.key("plan", problem.graph, replace(known, job=job, subproblem=subproblem), *more)


def _on_any_mesh(problem: Problem) -> Conditions:
    """Conditions of what is stated of a problem on any mesh: looks and exact plans state the same."""
    known = in_any_room(problem)
    policy = replace(known.policy, effort=EffortPolicy(), stages=StagePolicy())
    subproblem = replace(known.subproblem, looks_only=False, any_that_fits=False)
    return replace(known, job=replace(known.job, mesh_shape=None), policy=policy, subproblem=subproblem)


def without_room(
    problem: Problem,
    what: str,
    of: tuple[Hashable, ...],
    make: Callable[[Meter], Value],
    cutoff_s: float = math.inf,
) -> Value:
    """An answer about a problem that does not depend on its memory limit; its work counts once in a search.

    Args:
        problem: to be sharded.
        what: kind of answer.
        of: everything that it depends on besides the problem.
        make: makes it, and counts its work.
        cutoff_s: seconds that it has to stay below to be of use.
    """
    return problem.store.counted(key_without_room(problem, what, *of), problem.meter, make, Room(cutoff_s=cutoff_s))


def key_without_room(problem: Problem, what: str, *of: Hashable) -> Key:
    """Key of an answer as of `without_room`."""
    return problem.store.key(what, problem.graph, _on_any_mesh(problem), *of)


def room_of(problem: Problem) -> Room:
    """Room that the plan of a problem has to fit into."""
    p = problem.subproblem
    return Room(problem.memory_limit_bytes, p.extra_in_flight, p.other_stages, p.cutoff_s)


def _deciding(policy: SearchPolicy) -> SearchPolicy:
    """The thresholds that plans depend on: when a second process starts is none of them."""
    return replace(policy, workers=WorkerPolicy())


def _job_data(job: Job) -> dict[str, Any]:
    """All of a job."""
    fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
    return {name: _schedule_data(v) if name == "schedule" else plain_data(v) for name, v in fields.items()}


def _schedule_data(schedule: Any) -> Any:
    """The word for a free schedule; the name of one, with the class that has it; or one with its options."""
    if isinstance(schedule, str) and schedule not in ("auto", "none"):
        return [schedule, class_name(factory_named(schedule))]
    return plain_data(schedule)


def _cost_model_data(model: CostModel) -> dict[str, Any]:
    """All that decides: of the constants what the model has made of them."""
    parts = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name != "constants"}
    parts_data = {n: _cluster_data(v) if isinstance(v, Cluster) else plain_data(v) for n, v in parts.items()}
    return {"class": class_name(model), **parts_data}


def _cluster_data(cluster: Cluster) -> str:
    """The text that plans have of a cluster. One that runs on Ray is planned for as any other."""
    class_name(cluster)
    return cluster.to_json()


def class_name(value: Any) -> str:
    """Name of the class of a value, or of a class itself. NotPlainError where it is not autopar's own."""
    kind = value if isinstance(value, type) else type(value)
    if not is_own(kind):
        raise NotPlainError(f"{kind.__qualname__} is not autopar's own")
    return f"{kind.__module__}:{kind.__qualname__}"
