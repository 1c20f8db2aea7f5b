"""Plans on disk by what they are plans of, so that what was planned is not planned again.

`PlanCache` keeps files of plans in a folder, each under its key: `key_of` hashes everything that the plan depends on,
as `autopar.search.problem_data` writes it. `Cached` is a strategy that looks for a plan there before it searches.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from autopar._compat.files import CACHE_VARIABLE, cache_root, private_folder, read_kept, write_whole
from autopar.errors import PlanMismatchError, ScheduleError
from autopar.ir import Graph, Operator
from autopar.ir.text import graph_text
from autopar.plan import Plan, PlanContent
from autopar.plan.codec import encode
from autopar.plan.details import NO_DETAILS, Details
from autopar.plan.trail import TrailRow
from autopar.schedule.registry import registered_schedules
from autopar.search.clock import Clock
from autopar.search.constraints import shards_of
from autopar.search.operator_details import with_stage_operators
from autopar.search.outcome import Bounded
from autopar.search.pipeline.branches import branches
from autopar.search.pipeline.search import pipeline
from autopar.search.problem import Problem
from autopar.search.problem_data import Conditions, NotPlainError, class_name, environment_hash, plain_data
from autopar.search.registry import Strategy, answer_of, cuts_stages
from autopar.search.trail import Trail
from autopar.sharding import rule_for
from autopar.sharding.registry import registered_rules
from autopar.solver.meter import Meter, Work


def key_of(problem: Problem, planner: Any, environment_hash: str | None) -> str | None:
    """The key of the plan that a planner makes of a problem; None where such plans are not to be kept.

    Two problems have one key only if their plans are equal to the byte: it is a hash of the whole graph (names, roles,
    scopes and updates too; lines of the source only where the plan tells them), the cluster, the cost model, every
    option and threshold, jax's settings, and the environment_hash. Not kept are plans

    - of searches that are watched by `Reporting.progress`, which would have nothing to say,
    - where a user registered a sharding rule or a schedule, or gave a strategy, schedule, cost model or source that is
      not autopar's own: what these do is not known,
    - of graphs that were traced under settings without a text that is the same in every process.

    Args:
        problem: what is planned.
        planner: the strategy, with what is planned by it besides, as plain data; see `autopar.search.problem_data`.
        environment_hash: hash of autopar's code, of versions and of the kind of machine; with None no plan is kept.

    Returns:
        SHA-256, 64 hexadecimal digits.
    """
    if (
        environment_hash is None
        or problem.settings is None
        or problem.reporting.progress is not None
        or registered_rules()
        or registered_schedules()
    ):
        return None
    try:
        data = {
            "planner": plain_data(planner),
            **Conditions.of(problem).data(),
            "source": None if problem.source is None else class_name(problem.source),
            "settings": problem.settings,
            "environment": environment_hash,
        }
    except (NotPlainError, ScheduleError):
        return None
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode())
    digest.update(graph_text(without_lines(problem.graph)).encode())
    return digest.hexdigest()


def without_lines(graph: Graph) -> Graph:
    """The graph without the lines of its source, but for those that a plan's notes tell."""
    return replace(graph, operators=tuple(_without_line(graph, op) for op in graph.operators))


def _without_line(graph: Graph, op: Operator) -> Operator:
    regions = tuple((name, without_lines(region)) for name, region in op.regions)
    # Of operators that have no rule, call Python or say where a value lies there is a note with the line.
    _, known = rule_for(op, graph.operand_types(op))
    keeps_line = not known or shards_of(op) is not None or op.primitive.endswith("_callback")
    return replace(op, regions=regions, source=op.source if keeps_line else "")


_SUFFIX = ".plan.gz"
#: Of what `write_whole` has not finished.
_PART = ".part"
#: Between size and speed: plans are repetitive text, so that more effort wins little.
_EFFORT = 6
#: Bytes of a plan's text at most: a small file may unpack to any size.
_MOST_UNPACKED_BYTES = 2**28
#: zlib's name of the format.
_GZIP = 16 + zlib.MAX_WBITS
#: Seconds after which what a writer left that was ended is removed.
_LEFT_S = 3600.0
#: Environment variable that names the folder of what autopar keeps, or turns that off.
VARIABLE = CACHE_VARIABLE


@dataclass(frozen=True)
class PlanCache:
    """Plans as files that several processes may read and write at the same time.

    A file has the key and the plan's JSON, compressed. It is there whole or not at all. What cannot be read or written
    is as if it were not there: nothing here raises for the sake of a file.

    Args:
        folder: where the files are; made when the first is written.
        most_bytes: bytes that they may take together; those that were not used for longest are dropped.
        least_s: seconds that planning must have taken for the plan to be kept.
    """

    folder: Path
    most_bytes: int = 2**28
    least_s: float = 1.0

    @cached_property
    def environment_hash(self) -> str | None:
        """Hash of the versions of autopar, jax and Python that plans depend on, computed once."""
        return environment_hash()

    def get(self, key: str) -> tuple[Plan, Meter, Sequence[TrailRow]] | None:
        """The plan kept under a key, which counts as used, with what it took and its trail; None where there is none.

        A file that is cut short, damaged or something else is removed.
        """
        path = self._path(key)
        try:
            raw = read_kept(path, self.most_bytes)
        except (OSError, ValueError):
            return None
        try:
            kept = _unpacked(key, raw)
        except (OSError, EOFError, ValueError, zlib.error, PlanMismatchError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return kept

    def put(
        self,
        key: str,
        content: PlanContent,
        details: Details = NO_DETAILS,
        meter: Meter | None = None,
        rows: Sequence[TrailRow] = (),
    ) -> None:
        """Keeps a plan under a key, unless it is too large, its text does not give it back, or the disk is full.

        Args:
            key: from `key_of`.
            content: the plan.
            details: its timeline and other figures that are not in the plan's own file.
            meter: work units that planning took.
            rows: rows of the trail: what became of each region of the search.
        """
        with contextlib.suppress(OSError, ValueError, PlanMismatchError):
            raw = _packed(key, encode(content, details), meter or Meter(), rows)
            if len(raw) <= self.most_bytes and _unpacked(key, raw)[0].content == content:
                private_folder(self.folder, tighten=True)
                write_whole(self._path(key), raw, private=True)
                self._drop_oldest()

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each plan's file."""
        return tuple(size for _, size, path in self._files() if path.suffix != _PART)

    def clear(self) -> int:
        """Removes all files, and says how many were removed."""
        return sum(_removed(path) for _, _, path in self._files())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of all files, the oldest first."""
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"*{_SUFFIX}*"):
                with contextlib.suppress(OSError):  # another process removed it
                    stat = path.stat()
                    files.append((stat.st_mtime, stat.st_size, path))
        return sorted(files)

    def _drop_oldest(self) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for used, size, path in files:
            left_over = path.suffix == _PART and used < time.time() - _LEFT_S
            if left_over or (total > self.most_bytes and path.suffix != _PART):
                _removed(path)
                total -= size


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


class _Searched(msgspec.Struct):
    """Work of planning by kind and by key of a store, and its trail."""

    counts: dict[Work, int]
    kept: dict[str, dict[Work, int]]
    rows: tuple[TrailRow, ...]


def _packed(key: str, plan: str, meter: Meter, rows: Sequence[TrailRow]) -> bytes:
    searched = msgspec.json.encode(_Searched(meter.counts, meter.kept, tuple(rows))).decode()
    return gzip.compress(f"{key}\n{searched}\n{plan}".encode(), _EFFORT, mtime=0)


def _unpacked(key: str, raw: bytes) -> tuple[Plan, Meter, Sequence[TrailRow]]:
    """The plan in a file, and what it took. ValueError and others where it holds none, or that of another key."""
    unpacker = zlib.decompressobj(_GZIP)
    data = unpacker.decompress(raw, _MOST_UNPACKED_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"the file holds more than {_MOST_UNPACKED_BYTES} bytes, or is cut short")
    head, _, text = data.partition(b"\n")
    if head != key.encode():
        raise ValueError(f"the file holds {head[:64]!r}")
    searched, _, text = text.partition(b"\n")
    known = msgspec.json.decode(searched, type=_Searched)
    return Plan.from_json(text), Meter(known.counts, known.kept), known.rows


def plan_cache(environment: Mapping[str, str]) -> PlanCache | None:
    """The cache that an environment asks for, in a folder ``plans``; None where it is turned off.

    Args:
        environment: variables; see `cache_root`.
    """
    root = cache_root(environment)
    return None if root is None else PlanCache(root / "plans")


@dataclass(frozen=True)
class Checked:
    """A strategy whose answers are checked. In keys it counts as that strategy.

    Args:
        planner: the strategy.
    """

    planner: Strategy

    def __call__(self, problem: Problem) -> Plan | Bounded:
        """The answer to a problem. Raises AutoparError where it is no plan."""
        return answer_of(self.planner, problem)


@dataclass(frozen=True)
class Cached:
    """A planner whose plans are kept: itself a strategy.

    A plan that was kept has the content that it had, and one phase, "cache"; its work counts as if it was planned. A
    solver that stopped at its time limit leaves a plan whose bound is below its cost; it is kept like any other, for
    the limit is part of the key: to search for longer ask for more time. That no plan fits is not kept.

    Args:
        search: plans what is not kept.
        cache: where plans are kept.
        planner: what ``search`` is, for the key: see `key_of`.
    """

    search: Callable[[Problem], Plan | Bounded]
    cache: PlanCache
    planner: Any

    def __call__(self, problem: Problem) -> Plan | Bounded:
        """The plan of a problem. Errors are those of the search."""
        clock = Clock()
        with clock.phase("cache"):
            key = key_of(problem, self.planner, self.cache.environment_hash)
            kept = None if key is None else self.cache.get(key)
        if kept is not None:
            plan, meter, rows = kept
            problem.meter.merge(meter)
            problem.trail.rows.extend(rows)
            problem.log(f"read the plan of {problem.graph.name} from the cache {self.cache.folder}")
            return Plan(plan.content, clock.phases(), details=plan.details)
        began, meter, trail = time.perf_counter(), Meter(search=problem.meter), Trail()
        source = None if problem.source is None else problem.source.metered(meter)
        try:
            answer = self.search(replace(problem, source=source, meter=meter, trail=trail))
        finally:
            problem.meter.merge(meter)
            problem.trail.rows.extend(trail.rows)
        if isinstance(answer, Bounded):
            return answer
        if key is not None and time.perf_counter() - began >= self.cache.least_s:
            if problem.source is not None:  # no part of the search, which has a meter
                answer = with_stage_operators(answer, problem.graph, problem.source.metered(Meter()))
            self.cache.put(key, answer.content, answer.details, meter, trail.rows)
        return answer


def cached(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A strategy whose answers are checked, and whose plans are kept where there is a cache."""
    return Checked(strategy) if cache is None else Cached(Checked(strategy), cache, strategy)


def cached_with_stages(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A planner of several stages by a strategy; plans of stages and of the whole are kept where there is a cache.

    That is the strategy where it cuts the step into stages itself, else the search of pipelines.
    """
    if cuts_stages(strategy):
        return cached(strategy, cache)
    whole = partial(pipeline, intra=cached(strategy, cache))
    return whole if cache is None else Cached(whole, cache, ("pipeline", strategy))


def cached_with_branches(strategy: Strategy, cache: PlanCache | None) -> Strategy:
    """A planner of independent branches side by side, by a strategy that shards one stage."""
    whole = partial(branches, intra=cached(strategy, cache))
    return whole if cache is None else Cached(whole, cache, ("branches", strategy))
