"""Problems as plain data for JSON, and as files: equal problems give equal data, in every process.

Keys of answers of a search (`autopar.search.store`) and of plans on disk (`autopar.search.cache`) are made of all that
a plan depends on but its graph. `save_problem` and `load_problem` keep graph, cluster and job in a file, so that
searches are compared on the same things.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from autopar._compat.files import write_whole
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import AutoparError, ScheduleError
from autopar.ir.text import GraphSyntaxError, graph_text, parse_graph
from autopar.ir.verify import verify
from autopar.schedule import factory_named
from autopar.search.constraints import Constraint
from autopar.search.job import Job, Request, Solving
from autopar.search.policy import EffortPolicy, SearchPolicy, StagePolicy
from autopar.search.problem import Problem, Subproblem
from autopar.search.store import Key, Room
from autopar.solver.meter import Meter

#: Packages whose version may change a plan; one that is not installed counts as that.
PACKAGES = ("highspy", "jax", "jaxlib", "msgspec", "networkx", "numba", "numpy", "pulp", "scipy")


class NotPlainError(ValueError):
    """The value cannot be plain data, as a user's function."""


def plain_data(value: Any) -> Any:
    """A value as data for JSON.

    Args:
        value: None, a truth value, a number, text, a tuple or a frozenset of such; a function or an object of autopar
            that holds nothing else. What autopar's own things do is in `environment_hash`.

    Raises:
        NotPlainError: it is something else: a function or an object of a user, or one that collects.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, tuple):
        return [plain_data(v) for v in value]
    if isinstance(value, frozenset):
        return {"set": sorted(json.dumps(plain_data(v)) for v in value)}
    if isinstance(value, FunctionType):
        return {"function": _qualified_name(value)}
    return {"object": _qualified_name(type(value)), "of": {name: plain_data(v) for name, v in _parts(value)}}


def is_own(kind: type | FunctionType) -> bool:
    """Whether a class or function is autopar's own, so that its module has it under its name."""
    placement, *names = kind.__module__, *kind.__qualname__.split(".")
    module: Any = sys.modules.get(placement)
    for name in names:
        module = getattr(module, name, None)
    return placement.startswith(f"{_package()}.") and module is kind


def is_importable(value: Any) -> bool:
    """Whether a function or an object is autopar's own, with all that it holds: another process can have it as well."""
    if isinstance(value, FunctionType):
        return is_own(value)
    if value is None or isinstance(value, str | Integral | float | Path):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(is_importable, value))
    parts = [v for _, v in _parts(value)] if dataclasses.is_dataclass(value) else None
    return parts is not None and is_own(type(value)) and all(map(is_importable, parts))


def _qualified_name(kind: type | FunctionType) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not is_own(kind):
        raise NotPlainError(f"{name} is not autopar's own")
    return name


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Names and values of what an object holds, sorted."""
    if dataclasses.is_dataclass(value):
        return sorted((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, msgspec.Struct):
        return sorted((name, getattr(value, name)) for name in value.__struct_fields__)
    try:
        return sorted(vars(value).items())
    except TypeError as error:
        raise NotPlainError(f"{type(value).__qualname__} does not say what it holds") from error


def _package() -> str:
    return __name__.partition(".")[0]


def environment_hash() -> str | None:
    """SHA-256 of what every plan depends on: autopar's own code, Python, versions of packages, the kind of machine.

    64 hexadecimal digits; None where the code is not in files, so that a change of it would not be seen.
    """
    root = Path(__file__).resolve().parents[1]
    paths = sorted(root.rglob("*.py")) if Path(__file__).is_file() else []
    if not paths:
        return None
    files = tuple((p.relative_to(root).as_posix(), s.st_mtime_ns, s.st_size) for p in paths for s in (p.stat(),))
    return _hash_of_files(root, files)


@lru_cache(maxsize=1)
def _hash_of_files(root: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """The environment's hash with the code of a folder, which is read once a process unless a file changes.

    Args:
        root: the folder.
        files: path in it, time of the last change in ns, and bytes of each file.
    """
    digest = hashlib.sha256()
    for path, _, _ in files:
        text = (root / path).read_bytes()
        digest.update(f"{path} {len(text)}\n".encode() + text)
    versions = [(name, _version(name)) for name in PACKAGES]
    digest.update(json.dumps([versions, list(sys.version_info[:3]), platform.machine()]).encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
        return _digest(self.data)

    def __hash__(self) -> int:
        return hash((self.cluster.num_devices, self.job.num_microbatches, self.subproblem))


def _digest(data: Callable[[], Any]) -> str | None:
    """A hash of plain data that is the same in every process; None where something in them is not autopar's own."""
    try:
        return hashlib.sha256(json.dumps(data(), sort_keys=True).encode()).hexdigest()[:24]
    except (NotPlainError, ScheduleError):
        return None


@dataclass(frozen=True)
class PlannedBy:
    """A planner of stages, as a part of a key."""

    planner: Callable[[Problem], Any]

    @cached_property
    def digest(self) -> str | None:
        """A hash that is the same in every process; None where it is a user's own."""
        return _digest(lambda: plain_data(getattr(self.planner, "planner", self.planner)))

    def __hash__(self) -> int:
        try:
            return hash(self.planner)
        except TypeError:
            return id(self.planner)


def in_any_room(problem: Problem) -> Conditions:
    """The problem's conditions without memory limit and microbatches in flight, as keys of plans have them.

    A plan is kept with the limit that it was made for, and may serve another one.
    """
    known = Conditions.of(problem)
    # What may lie in host memory is measured by the limit.
    limit = None if problem.job.offload == "none" else problem.memory_limit_bytes
    subproblem = replace(
        known.subproblem,
        cutoff_s=math.inf,
        tried_stages=None,
        first_count=0,
        stages_per_worker=1,
        ample_memory=False,
        extra_in_flight=min(1, known.subproblem.extra_in_flight),
    )
    return replace(known, job=replace(known.job, memory_limit_bytes=limit), subproblem=subproblem)


def key_of_plan(problem: Problem, *more: Hashable) -> Key:
    """Key of the plans of a problem within any memory limit.

    Args:
        problem: what is planned.
        more: what plans it.
    """
    known = in_any_room(problem)
    job = replace(known.job, memory_limit_bytes=None)
    subproblem = replace(known.subproblem, extra_in_flight=0, other_stages=0)
    return problem.store.key("plan", problem.graph, replace(known, job=job, subproblem=subproblem), *more)


def _on_any_mesh(problem: Problem) -> Conditions:
    """Conditions of what is stated of a problem on any mesh: relaxations and exact plans state the same."""
    known = in_any_room(problem)
    policy = replace(known.policy, effort=EffortPolicy(), stages=StagePolicy())
    subproblem = replace(known.subproblem, relaxation_only=False, any_that_fits=False)
    return replace(known, job=replace(known.job, mesh_shape=None), policy=policy, subproblem=subproblem)


def without_room(
    problem: Problem,
    what: str,
    of: tuple[Hashable, ...],
    make: Callable[[Meter], Value],
    cutoff_s: float = math.inf,
) -> Value:
    """An answer about a problem that does not depend on its memory limit, kept; its work counts once in a search.

    Args:
        problem: to be sharded.
        what: kind of answer.
        of: everything that it depends on besides the problem.
        make: makes it, and counts its work.
        cutoff_s: seconds that it has to stay below to be of use.
    """
    return problem.store.counted(key_without_room(problem, what, *of), problem.meter, make, Room(cutoff_s=cutoff_s))


def key_without_room(problem: Problem, what: str, *of: Hashable) -> Key:
    """Key of an answer about a problem that does not depend on its memory limit."""
    return problem.store.key(what, problem.graph, _on_any_mesh(problem), *of)


def room_of(problem: Problem) -> Room:
    """Memory limit, microbatches in flight and seconds that the plan of a problem has to stay within."""
    p = problem.subproblem
    return Room(problem.memory_limit_bytes, p.extra_in_flight, p.other_stages, p.cutoff_s)


def _deciding(policy: SearchPolicy) -> SearchPolicy:
    """The thresholds that plans depend on: when a second process starts is none of them."""
    return replace(policy, in_second_process=None)


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


_VERSION = 1


def save_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Writes a problem as JSON, compressed if the name ends in ``.gz``; the same problem gives the same bytes.

    What limits a search (time, steps, seed) is not in it, nor is the source: one stage is planned of what is read.
    """
    job = problem.job
    data = {
        "autopar_problem": _VERSION,
        "cluster": json.loads(problem.cluster.to_json()),
        "options": {
            "donated": sorted(job.donated),
            "memory_limit_bytes": job.memory_limit_bytes,
            "mesh_shape": None if job.mesh_shape is None else list(job.mesh_shape),
            "num_microbatches": job.num_microbatches,
            **(
                {"constraints": [[c.value, list(c.shards), c.text, c.axes] for c in job.constraints]}
                if job.constraints
                else {}
            ),
        },
        "graph": graph_text(problem.graph),
    }
    text = (json.dumps(data, indent=1) + "\n").encode()
    write_whole(path, gzip.compress(text, mtime=0) if os.fspath(path).endswith(".gz") else text)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """The problem in a file of `save_problem`. Raises AutoparError where the file holds none."""
    try:
        raw = Path(path).read_bytes()
        data: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if data["autopar_problem"] != _VERSION:
            raise AutoparError(
                f"{os.fspath(path)} has version {data['autopar_problem']}; this autopar reads {_VERSION}"
            )
        graph = parse_graph(data["graph"])
        cluster = Cluster.from_dict(data["cluster"])
        o = data["options"]
        shape = o["mesh_shape"]
        job = Job(
            mesh_shape=None if shape is None else tuple(shape),
            memory_limit_bytes=o["memory_limit_bytes"],
            donated=frozenset(o["donated"]),
            num_microbatches=o["num_microbatches"],
            constraints=tuple(_constraint(*c) for c in o.get("constraints", ())),
        )
    except (OSError, EOFError, RecursionError, ValueError, KeyError, TypeError, GraphSyntaxError) as error:
        raise AutoparError(
            f"{os.fspath(path)} holds no problem: {error}", remedy="write it with save_problem"
        ) from error
    verify(graph)
    return Problem(graph, cluster, CostModel(cluster), job=job)


def _constraint(value: str, shards: list[int], text: str, axes: list[list[str]] | None) -> Constraint:
    return Constraint(value, tuple(shards), text, None if axes is None else tuple(map(tuple, axes)))
