"""Plans on disk: equal to the byte, found by all that they depend on and nothing else, never in the way."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import autopar
import autopar.schedule.registry as schedules
from autopar import AutoparError, Cluster, InfeasiblePlanError
from autopar.api import pure
from autopar.cost import CostModel
from autopar.ir import Graph
from autopar.ir.text import graph_text
from autopar.plan import Plan, PlanContent
from autopar.runtime.ray.cluster import RayCluster
from autopar.schedule import get
from autopar.search import Manual, Problem, Subproblem, alpa, strategy_named
from autopar.search.cache import (
    Cached,
    Checked,
    PlanCache,
    cached,
    cached_with_stages,
    key_of,
    plan_cache,
    without_lines,
)
from autopar.search.compare import Budget, Budgeted
from autopar.search.constraints import Constraint, SharedStages
from autopar.search.job import Job, Request, Solving
from autopar.search.mesh_search import MeshSearch
from autopar.search.policy import SearchPolicy
from autopar.search.problem_data import NotPlainError, environment_hash, plain_data
from autopar.sharding import register_rule, unregister_rule
from examples import mlp
from tests.report.plans import make_plan
from tests.search.problems import f32, problem_of, problem_with, toy

KEY = "0123456789abcdef" * 4

#: For each option another value than its default; a new option needs an entry, and is then part of the key.
OTHERS = {
    "mesh_shape": (2, 4),
    "memory_limit_bytes": 10**6,
    "donated": frozenset({"x"}),
    "num_microbatches": 2,
    "num_stages": None,
    "schedule": "gpipe",
    "time_limit_s": 5.0,
    "seed": 1,
    "steps": 5,
    "remat": "none",
    "offload": "auto",
    "attention": "blocks",
    "padding": True,
    "collective_matmul": "auto",
    "token_slices": (4, 2),
    "constraints": (Constraint("x", (1,), "x is whole"),),
    "shared_stages": SharedStages(((0, 2), (2, 2)), ((2,), (2,)), (("x", 0),), 2),
}

#: Likewise of what the planner demands.
DEMANDS = {
    "extra_in_flight": 1,
    "uniform_stages": True,
    "on_workers": True,
    "separate_programs": True,
    "arriving": frozenset({"x"}),
    "met": frozenset({"x"}),
    "cutoff_s": 1.0,
    "tried_stages": (2, 4),
    "first_count": 4,
    "stages_per_worker": 2,
    "ample_memory": True,
    "relaxation_only": True,
    "any_that_fits": True,
    "block_scores": 64,
    "other_stages": 2,
}


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w.T)


def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(step, (f32(32, 64), f32(16, 32)), toy())


def kept(cache: PlanCache, key: str) -> PlanContent | None:
    """The plan under a key."""
    known = cache.get(key)
    return None if known is None else known[0].content


def cache_in(folder: Path, **options) -> PlanCache:
    return PlanCache(folder, least_s=0.0, **options)


class Counting:
    """A strategy that counts what it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, problem: Problem) -> Plan:
        self.calls += 1
        return alpa(problem)


def counted(cache: PlanCache, planner="alpa") -> tuple[Cached, Counting]:
    counting = Counting()
    return Cached(counting, cache, planner), counting


# -- what is found ---------------------------------------------------------------------------------


def test_a_plan_that_was_kept_is_equal_and_not_searched_for(problem: Problem, tmp_path: Path) -> None:
    first, _ = counted(cache_in(tmp_path))
    again, counting = counted(cache_in(tmp_path))
    said: list[str] = []
    planned = first(problem)
    kept = again(problem_with(problem, log=said.append))
    assert counting.calls == 0
    assert kept.content == planned.content and kept.to_json() == planned.to_json() == alpa(problem).to_json()
    assert [name for name, _ in kept.phases] == ["cache"]
    assert "cache" not in dict(planned.phases)
    assert said == [f"read the plan of {problem.graph.name} from the cache {tmp_path}"]


def test_only_plans_that_took_long_are_kept(problem: Problem, tmp_path: Path) -> None:
    search, counting = counted(PlanCache(tmp_path / "plans", least_s=math.inf))
    assert search(problem) == search(problem)
    assert counting.calls == 2 and not (tmp_path / "plans").exists()


def test_that_nothing_fits_is_not_kept(problem: Problem, tmp_path: Path) -> None:
    search, counting = counted(cache_in(tmp_path))
    for calls in (1, 2):
        with pytest.raises(InfeasiblePlanError):
            search(replace(problem, job=replace(problem.job, memory_limit_bytes=1)))
        assert counting.calls == calls
    assert list(tmp_path.iterdir()) == []


# -- the key ---------------------------------------------------------------------------------------


def test_every_option_is_named_here() -> None:
    assert {f.name for part in (Job, Request, Solving) for f in dataclasses.fields(part)} == OTHERS.keys()
    assert {f.name for f in dataclasses.fields(Subproblem)} == DEMANDS.keys()


@pytest.mark.parametrize("name", [*sorted(OTHERS), *sorted(DEMANDS)])
def test_another_option_is_another_key(problem: Problem, name: str) -> None:
    other = problem_with(problem, **{name: {**OTHERS, **DEMANDS}[name]})
    assert other != problem
    keys = [key_of(p, alpa, "") for p in (problem, other)]
    assert None not in keys and len(set(keys)) == 2


@pytest.mark.parametrize(
    "group", sorted(f.name for f in dataclasses.fields(SearchPolicy) if f.name != "in_second_process")
)
def test_another_threshold_is_another_key(problem: Problem, group: str) -> None:
    thresholds = getattr(problem.policy, group)
    name = dataclasses.fields(thresholds)[0].name
    value = getattr(thresholds, name)
    other = replace(thresholds, **{name: value[:-1] if isinstance(value, tuple) else value + 1})
    changed = replace(problem, policy=replace(problem.policy, **{group: other}))
    keys = [key_of(p, alpa, "") for p in (problem, changed)]
    assert None not in keys and len(set(keys)) == 2


def test_when_a_second_process_starts_is_no_part_of_the_key(problem: Problem) -> None:
    policy = replace(problem.policy, in_second_process=True)
    assert key_of(replace(problem, policy=policy), alpa, "") == key_of(problem, alpa, "") is not None


def test_who_is_told_changes_nothing_and_who_watches_plans_anew(problem: Problem) -> None:
    assert key_of(problem_with(problem, log=print), alpa, "") == key_of(problem, alpa, "")
    assert key_of(problem_with(problem, progress=print), alpa, "") is None


def test_key_depends_on_cluster_costs_planner_and_surroundings(problem: Problem) -> None:
    other = toy(bandwidth=2e9)
    keys = [
        key_of(problem, alpa, ""),
        key_of(problem, alpa, "other"),
        key_of(problem, strategy_named("beam"), ""),
        key_of(problem, Manual(dp=8), ""),
        key_of(problem, Manual(dp=8, zero=1), ""),
        key_of(problem, ("pipeline", alpa), ""),
        key_of(replace(problem, cluster=other), alpa, ""),
        key_of(replace(problem, cost_model=CostModel(other)), alpa, ""),
        key_of(replace(problem, cost_model=CostModel(problem.cluster, launch_s=1.0)), alpa, ""),
        key_of(replace(problem, cost_model=CostModel(problem.cluster, all_reduce="best")), alpa, ""),
    ]
    assert None not in keys and len(set(keys)) == len(keys)


def _changed_graphs(graph: Graph) -> Iterator[Graph]:
    first, *rest = graph.inputs
    op, *others = graph.operators
    out, *more = graph.outputs
    yield replace(graph, name="other")
    yield replace(graph, inputs=(replace(first, role="batch"), *rest))
    yield replace(graph, operators=(replace(op, scope="other"), *others))
    yield replace(graph, outputs=(replace(out, updates=None if out.updates else first.name), *more))
    yield replace(graph, outputs=(replace(out, path="other"), *more))


def test_key_depends_on_all_of_the_graph_but_its_lines(problem: Problem) -> None:
    op, *others = problem.graph.operators
    moved = replace(problem.graph, operators=(replace(op, source="other.py:1 (f)"), *others))
    assert moved != problem.graph
    assert key_of(replace(problem, graph=moved), alpa, "") == key_of(problem, alpa, "")
    keys = [key_of(replace(problem, graph=g), alpa, "") for g in (problem.graph, *_changed_graphs(problem.graph))]
    assert None not in keys and len(set(keys)) == len(keys)


def test_lines_that_notes_of_a_plan_tell_are_in_the_key(problem: Problem) -> None:
    unknown = tuple(replace(op, primitive="no_rule") for op in problem.graph.operators)
    graph = replace(problem.graph, operators=unknown)
    assert graph_text(without_lines(graph)) == graph_text(graph)


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process(problem: Problem) -> None:
    program = (
        "from autopar.search import alpa\n"
        "from autopar.search.cache import key_of\n"
        "from autopar.search.problem_data import environment_hash\n"
        "from tests.search.test_cache import f32, problem_of, step, toy\n"
        "problem = problem_of(step, (f32(32, 64), f32(16, 32)), toy())\n"
        "print(key_of(problem, alpa, environment_hash()))\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    here = problem_of(step, (f32(32, 64), f32(16, 32)), toy())
    assert done.stdout.split() == [key_of(here, alpa, environment_hash())]


@pytest.mark.slow
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda s: st.lists(s).map(tuple))
)
def test_values_are_told_apart(value: object) -> None:
    text = json.dumps(plain_data(value))
    assert json.dumps(plain_data((value,))) != text
    if isinstance(value, int):
        assert isinstance(value, bool) or json.dumps(plain_data(float(value % 2**53))) != json.dumps(
            plain_data(value % 2**53)
        )


@given(st.sets(st.text(), min_size=1))
def test_sets_are_told_in_one_order(names: set[str]) -> None:
    assert plain_data(frozenset(names)) == plain_data(frozenset(sorted(names, reverse=True)))
    assert plain_data(frozenset(names)) != plain_data(frozenset(names) - {min(names)})


# -- what is not known -----------------------------------------------------------------------------


def test_with_a_registered_rule_nothing_is_kept(problem: Problem, tmp_path: Path) -> None:
    search, counting = counted(cache_in(tmp_path))
    register_rule("my_kernel", lambda op, types: None)
    try:
        assert key_of(problem, alpa, "") is None
        search(problem), search(problem)
    finally:
        unregister_rule("my_kernel")
    assert counting.calls == 2 and list(tmp_path.iterdir()) == []
    assert key_of(problem, alpa, "") is not None


def test_with_a_registered_schedule_nothing_is_kept(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_REGISTRY", schedules.built_in())
    assert key_of(problem, alpa, "") is not None
    schedules.register("mine")(type(get("1f1b")))
    assert key_of(problem, alpa, "") is None


@pytest.mark.parametrize(
    "strategy",
    [lambda problem: alpa(problem), Counting(), Budgeted(alpa, Budget(), 0), SimpleNamespace()],
    ids=["lambda", "object", "budgeted", "foreign"],
)
def test_plans_of_unknown_strategies_are_not_kept(problem: Problem, strategy: object) -> None:
    assert key_of(problem, strategy, "") is None
    assert key_of(problem, ("pipeline", strategy), "") is None


def test_plans_for_unknown_clusters_costs_and_sources_are_not_kept(problem: Problem) -> None:
    class MyCluster(Cluster):
        pass

    class MyCosts(CostModel):
        pass

    mine = MyCluster(problem.cluster.name, problem.cluster.groups)
    assert mine.to_json() == problem.cluster.to_json()
    assert key_of(replace(problem, cluster=mine), alpa, "") is None
    assert key_of(replace(problem, cost_model=MyCosts(problem.cluster)), alpa, "") is None
    assert key_of(replace(problem, cost_model=CostModel(mine)), alpa, "") is None
    assert key_of(replace(problem, source=SimpleNamespace()), alpa, "") is None


def test_a_cluster_on_ray_is_planned_for_as_any_other(problem: Problem) -> None:
    ray = RayCluster(problem.cluster.name, problem.cluster.groups)
    found = key_of(replace(problem, cluster=ray, cost_model=CostModel(ray)), alpa, "")
    assert found == key_of(problem, alpa, "") is not None


def test_a_changed_file_of_the_package_changes_the_surroundings(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "autopar" / "search" / "problem_data.py"
    own.parent.mkdir(parents=True)
    monkeypatch.setattr(importlib.import_module("autopar.search.problem_data"), "__file__", str(own))
    assert environment_hash() is None and key_of(problem, alpa, environment_hash()) is None
    found = []
    for name, text in (
        ("search/problem_data.py", "a"),
        ("search/problem_data.py", "b"),
        ("solve.py", ""),
        ("x.py", ""),
    ):
        (tmp_path / "autopar" / name).write_text(text)
        found.append(environment_hash())
    assert None not in found and len(set(found)) == len(found)


def test_the_package_is_read_once_by_all_decorated_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, read = PlanCache(tmp_path / "a").environment_hash, []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    assert PlanCache(tmp_path / "b").environment_hash == first
    assert read == []


def test_schedules_are_told_by_their_options(problem: Problem) -> None:
    def key(schedule: object) -> str | None:
        return key_of(replace(problem, job=replace(problem.job, schedule=schedule)), alpa, "")

    class Mine(type(get("1f1b")).__base__):  # type: ignore[misc]
        name = "mine"

        def table(self, num_stages: int, num_microbatches: int):
            return get("1f1b").table(num_stages, num_microbatches)

    table = "0 | F0.0 B0.0"
    known = [key(s) for s in ("auto", "1f1b", "gpipe", get("gpipe"), get("interleaved"), get("interleaved", chunks=3))]
    known.append(key(get("table", text=table)))
    assert None not in known and len(set(known)) == len(known)
    assert key(Mine()) is None and key("there is none") is None


def test_functions_that_are_not_found_by_name_are_not_told() -> None:
    assert plain_data(alpa) == {"function": "autopar.search.alpa:alpa"}
    for value in ([1], {}, object(), lambda: None, Counting, graph_text.__code__):
        with pytest.raises(NotPlainError):
            plain_data(value)


# -- files -----------------------------------------------------------------------------------------


DAMAGES = {
    "cut": lambda raw: raw[:-20],
    "empty": lambda raw: b"",
    "changed": lambda raw: raw[:90] + bytes([raw[90] ^ 255]) + raw[91:],
    "text": lambda raw: b"nothing of the kind",
    "other key": lambda raw: gzip.compress(gzip.decompress(raw).replace(KEY.encode(), b"f" * 64, 1)),
    "no plan": lambda raw: gzip.compress(f"{KEY}\n{{}}".encode()),
    "other version": lambda raw: gzip.compress(
        gzip.decompress(raw).replace(b'"autopar_plan": 5', b'"autopar_plan": 0')
    ),
    "not text": lambda raw: gzip.compress(KEY.encode() + b"\n\xff\xfe"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_file_is_removed(tmp_path: Path, damage: str) -> None:
    cache = cache_in(tmp_path)
    cache.put(KEY, make_plan().content)
    (path,) = tmp_path.iterdir()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert kept(cache, KEY) is None
    assert list(tmp_path.iterdir()) == []
    cache.put(KEY, make_plan().content)
    assert kept(cache, KEY) == make_plan().content


def test_what_unpacks_to_more_than_a_plan_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan with spaces behind it, of which a small file may hold any number."""
    cache = cache_in(tmp_path)
    cache.put(KEY, make_plan().content)
    (path,) = tmp_path.iterdir()
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text + b" " * 2**16))
    assert kept(cache, KEY) == make_plan().content
    monkeypatch.setattr("autopar.search.cache._MOST_UNPACKED_BYTES", len(text) + 2**15)
    assert kept(cache, KEY) is None


@pytest.mark.parametrize("how", ["others write", "of another user", "a link"])
def test_what_others_may_have_written_is_not_read(tmp_path: Path, how: str) -> None:
    cache = cache_in(tmp_path / "plans")
    cache.put(KEY, make_plan().content)
    (path,) = (tmp_path / "plans").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700
    if how == "others write":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("only root gives files away")
    assert kept(cache, KEY) is None


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_file_with_any_changed_byte_is_no_other_plan(tmp_path_factory, place: int, by: int) -> None:
    cache = cache_in(tmp_path_factory.mktemp("cache"))
    cache.put(KEY, make_plan().content)
    (path,) = cache.folder.iterdir()
    raw = bytearray(path.read_bytes())
    raw[place % len(raw)] ^= by
    path.write_bytes(raw)
    assert kept(cache, KEY) in (None, make_plan().content)  # the head of gzip has bytes that mean nothing


def test_a_folder_that_cannot_be_used_is_no_error(problem: Problem, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    search, counting = counted(cache_in(tmp_path / "file" / "plans"))
    assert search(problem) == search(problem) and counting.calls == 2
    assert search.cache.sizes() == () and search.cache.clear() == 0


def test_a_full_disk_is_no_error(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(importlib.import_module("autopar.search.cache"), "write_whole", full)
    search, counting = counted(cache_in(tmp_path))
    assert search(problem) == search(problem) and counting.calls == 2


def test_a_folder_in_place_of_a_file_is_no_error(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.put(KEY, make_plan().content)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert kept(cache, KEY) is None
    cache.put(KEY, make_plan().content)
    assert path.is_dir()


def test_the_plans_that_were_not_used_for_longest_are_dropped(tmp_path: Path) -> None:
    def key(number: int) -> str:
        return f"{number:064x}"

    content = make_plan().content
    cache_in(tmp_path).put(key(0), content)
    (size,) = cache_in(tmp_path).sizes()
    cache = cache_in(tmp_path, most_bytes=3 * size + size // 2)
    for number in (1, 2):
        cache.put(key(number), content)
    for number in range(3):  # long ago, in this order
        os.utime(tmp_path / f"{key(number)}.plan.gz", (1000 + number, 1000 + number))
    assert kept(cache, key(0)) == content  # it is the newest now
    cache.put(key(3), content)
    assert [number for number in range(4) if kept(cache, key(number)) is not None] == [0, 2, 3]
    assert sum(cache.sizes()) <= cache.most_bytes


def test_a_plan_larger_than_all_may_be_drops_no_other(tmp_path: Path) -> None:
    cache_in(tmp_path).put(KEY, make_plan().content)
    cache_in(tmp_path, most_bytes=10).put("f" * 64, make_plan().content)
    assert cache_in(tmp_path).get(KEY) is not None and len(cache_in(tmp_path).sizes()) == 1


def test_what_an_ended_writer_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / f".{KEY}.plan.gz.00.part", tmp_path / f".{KEY}.plan.gz.11.part"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache_in(tmp_path).put(KEY, make_plan().content)
    assert not old.exists() and new.exists()
    assert len(cache_in(tmp_path).sizes()) == 1


def test_a_plan_that_its_text_does_not_give_back_is_not_kept(tmp_path: Path) -> None:
    cache_in(tmp_path / "plans").put(KEY, make_plan(step_time=math.inf).content)
    assert not (tmp_path / "plans").exists()


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    contents = [make_plan(step_time=float(n + 1)).content for n in range(4)]

    def work(n: int) -> bool:
        cache.put(KEY, contents[n % 4])
        return kept(cache, KEY) in contents

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_processes_at_the_same_time(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from autopar.search.cache import PlanCache\n"
        "from tests.report.plans import make_plan\n"
        "cache, content = PlanCache(Path(sys.argv[1])), make_plan().content\n"
        "for _ in range(20):\n"
        f"    cache.put({KEY!r}, content)\n"
        f"    assert cache.get({KEY!r})[0].content == content\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(tmp_path)]
    writers = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for writer in writers:
        _, said = writer.communicate(timeout=200)
        assert writer.returncode == 0, said
    assert len(list(tmp_path.iterdir())) == 1


# -- where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"AUTOPAR_CACHE_DIR": "/a/b"}, "/a/b/plans"),
        ({"AUTOPAR_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b/plans"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/autopar/plans"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/autopar/plans"),
        ({}, "~/.cache/autopar/plans"),
        ({"AUTOPAR_CACHE_DIR": "~/mine"}, "~/mine/plans"),
        ({"HOME": ""}, None),
        ({"HOME": "relative"}, None),
        ({"HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/autopar/plans"),
        ({"HOME": "", "AUTOPAR_CACHE_DIR": "mine"}, "mine/plans"),
        *(({"AUTOPAR_CACHE_DIR": off, "XDG_CACHE_HOME": "/c"}, None) for off in ("", " ", "0", "none", "off", "OFF")),
    ],
)
def test_where_plans_are(environment: dict[str, str], folder: str | None) -> None:
    found = plan_cache(environment)
    assert (found and found.folder) == (None if folder is None else Path(folder).expanduser())


def test_the_suite_keeps_nothing() -> None:
    assert plan_cache(os.environ) is None


# -- from parallelize ------------------------------------------------------------------------------


def _plan(monkeypatch: pytest.MonkeyPatch, folder: Path, example=mlp, **options) -> Plan:
    """The plan of a function that was decorated again, with plans kept in a folder."""
    monkeypatch.setattr(pure, "plan_cache", lambda _: cache_in(folder))
    fn, args = example.build(abstract=True)
    return autopar.parallelize(fn, **{"cluster": toy(4), **options}).plan(*args)


def _refuse(*_: object, **__: object) -> None:
    pytest.fail("something was searched for")


def _forbid_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever states a sharding problem or slices a step from now on fails."""
    for module, name in (("mesh_search", "build"), ("pipeline.trials", "plan_candidate")):
        monkeypatch.setattr(importlib.import_module(f"autopar.search.{module}"), name, _refuse)


@pytest.mark.parametrize(
    ("example", "options"),
    [
        (mlp, {"num_stages": 1}),
        (mlp, {"num_stages": 2, "num_microbatches": 2, "donate_argnums": 0}),
        (mlp, {"num_stages": 2, "num_microbatches": 2, "search": "gpipe"}),
        (mlp, {"num_stages": 1, "search": Manual(tp=2, dp=2)}),
    ],
    ids=["one stage", "pipeline", "cuts stages itself", "object"],
)
def test_a_new_function_reads_what_another_planned(monkeypatch, tmp_path: Path, example, options) -> None:
    first = _plan(monkeypatch, tmp_path, example, **options)
    assert "cache" not in dict(first.phases)
    said: list[str] = []
    _forbid_search(monkeypatch)
    again = _plan(monkeypatch, tmp_path, example, progress=said.append, **options)
    assert again.to_json() == first.to_json() and again.content == first.content
    assert "cache" in dict(again.phases) and "cache" in str(again).partition("planned in")[2]
    assert again.search.seconds is not None
    assert any("from the cache" in line for line in said)


@pytest.mark.slow
def test_a_pipeline_takes_stages_that_were_kept(monkeypatch, tmp_path: Path) -> None:
    options = {"num_stages": 2, "num_microbatches": 2}
    first = _plan(monkeypatch, tmp_path, **options)
    kept = {p: gzip.decompress(p.read_bytes()).split(b"\n", 2)[2] for p in tmp_path.iterdir()}
    whole = [p for p, text in kept.items() if len(Plan.from_json(text).stages) > 1]
    stages = len(list(tmp_path.iterdir())) - len(whole)
    assert len(whole) == 1 and stages >= 1
    whole[0].unlink()
    monkeypatch.setattr(MeshSearch, "plan", _refuse)  # layers are priced again
    again = _plan(monkeypatch, tmp_path, **options)
    assert again.to_json() == first.to_json()
    assert whole[0].exists()


@pytest.mark.slow
def test_a_plan_that_was_kept_runs(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pure, "plan_cache", lambda _: cache_in(tmp_path))
    fn, args = mlp.build()
    options = {"num_stages": 2, "num_microbatches": 2, "cluster": Cluster.local()}
    autopar.parallelize(fn, **options).plan(*args)
    step = autopar.parallelize(fn, **options)
    compiled = step.compile(*args)
    assert "cache" in dict(compiled.plan.phases)
    jax.tree.map(
        lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-5) or pytest.fail("differs"), step(*args), fn(*args)
    )


def test_compare_searches_every_time(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pure, "plan_cache", lambda _: cache_in(tmp_path))
    fn, args = mlp.build(abstract=True)
    for _ in range(2):
        found = autopar.compare(fn, *args, search=("alpa", "random"), steps=50, cluster=toy(4), num_stages=1)
        assert all("cache" not in dict(t.plan.phases) for t in found.trials if t.plan is not None)
        assert all(t.curve for t in found.trials)
    assert list(tmp_path.iterdir()) == []


def test_without_a_cache_strategies_only_have_their_answers_checked() -> None:
    asked: list[Any] = []
    for wrapped in (cached(asked.append, None), cached_with_stages(strategy_named("gpipe"), None)):
        assert isinstance(wrapped, Checked)
    with pytest.raises(AutoparError, match="returned None, not a Plan"):
        cached(asked.append, None)("the problem")
    assert asked == ["the problem"]
