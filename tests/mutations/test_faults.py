"""Faults can be put in, tests that may see them are found, and the one that is quickest to try is caught."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.mutations.__main__ import main
from tests.mutations.draw import drawn, text_of
from tests.mutations.pick import Reached
from tests.mutations.reach import blocks
from tests.mutations.run import DRAWN, ROOT, Notes, faults, fits


def test_there_are_forty_faults_on_all_floors_that_plan() -> None:
    assert len(faults()) >= 40
    assert len({f.name for f in faults()}) == len(faults())
    rooms = {f.file.split("/")[1] for f in faults()}
    assert {"cost", "ir", "microbatch", "recompute", "schedule", "search", "sharding", "simulate", "solver"} <= rooms


@pytest.mark.parametrize("fault", faults(), ids=lambda f: f.name)
def test_a_fault_can_be_put_in(fault) -> None:
    assert fault.old != fault.new
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.tests and all((ROOT / t.partition("::")[0]).exists() for t in fault.tests)


def test_drawn_faults_are_of_all_packages_and_most_can_still_be_put_in() -> None:
    kept = faults(DRAWN)
    assert len(kept) + len(faults()) >= 120
    assert len({f.file.split("/")[1] for f in kept}) >= 18
    assert sum(map(fits, kept)) >= 0.9 * len(kept)  # else: python -m tests.mutations.draw
    seen = [f for f in kept if not f.equivalent]
    assert sum(bool(f.tests) for f in seen) >= 0.95 * len(seen)  # else: python -m tests.mutations, and tests
    assert all(f.old != f.new for f in kept) and len({f.name for f in kept}) == len(kept)
    assert all((ROOT / t.partition("::")[0]).exists() for f in kept for t in f.tests)


def test_draws_are_of_the_seed_and_can_be_put_in(tmp_path) -> None:
    for name in ("cost/collectives.py", "cost/compute.py", "sharding/paths.py", "schedule/memory.py"):
        path = tmp_path / "autopar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text((ROOT / "autopar" / name).read_text(encoding="utf-8"))
    found = drawn(tmp_path, 1, 18)
    assert found == drawn(tmp_path, 1, 18) != drawn(tmp_path, 2, 18)
    assert {f.file.split("/")[1] for f in found} == {"cost", "schedule", "sharding"}
    assert len({f.name.partition(" in ")[0] for f in found}) >= 5
    assert all((ROOT / f.file).read_text(encoding="utf-8").count(f.old) == 1 for f in found)


def tried(*arguments: object, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What the command does in a process of its own: it forks, which is safe before jax has threads."""
    command = [sys.executable, "-m", "tests.mutations", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=False)


def test_a_fault_is_caught_by_a_test_that_it_names_and_kept(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    done = tried("time of work is the sum", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "caught   time of work is the sum of computing and memory  tests/cost/test_compute.py::" in done.stdout
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["outcome"] == "caught" and line["ran"]["not slow"] >= 1
    again = CliRunner().invoke(main, ["time of work is the sum", "--out", str(out)])
    assert (again.exit_code, "100.0%" in again.stdout) == (0, True)
    assert len(out.read_text().splitlines()) == 1  # what was tried is not tried again


def test_names_of_tests_in_their_order_and_those_that_are_gone() -> None:
    notes = Notes(["tests/a/test_b.py::test_c[2]", "tests/a", "tests/d.py::test_e"], Path("none"))
    assert notes.place("tests/a/test_b.py::test_c[2]") == 0
    assert notes.place("tests/a/test_b.py::test_c[1]") == notes.place("tests/a/x/test_y.py::test_z") == 1
    assert notes.place("tests/d.py::test_e[1-2]") == 2 and notes.place("tests/d.py::test_f") is None


def test_tests_that_run_the_changed_block_are_the_cheapest_of_each_file(tmp_path) -> None:
    (named,) = (f for f in faults() if f.name == "an all-reduce moves half of its bytes")
    first = max(
        first for first, last in blocks(ast.parse((ROOT / named.file).read_text())) if first <= named.line <= last
    )
    costs = {"tests/a/t.py::x": 0.2, "tests/a/t.py::y": 0.1, "tests/cost/u.py::z": 0.5, "tests/b/v.py::w": 99.0}
    path = tmp_path / "reach.jsonl"
    rows = [[test, cost, {named.file: [first]}] for test, cost in costs.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, ["tests/c/n.py::n", 0.1, {named.file: [1]}])))
    reached = Reached.read(path)
    assert reached.all_of(named) == set(costs)
    assert reached.of(named, 10.0, 10) == ("tests/cost/u.py::z", "tests/a/t.py::y", "tests/a/t.py::x")
    assert reached.files_of(named)[0] == "tests/cost/u.py"


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_wrong(tmp_path) -> None:
    """In a copy of the tests whose fault changes nothing."""
    for name in ("autopar", "benchmarks", "cost_models", "docs", "examples", "pyproject.toml", "README.md", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "tests" / "mutations" / "faults.toml"
    (named,) = (f for f in faults() if f.name == "an all-reduce moves half of its bytes")
    path.write_text(text_of([replace(named, new=named.old + " ")]))
    done = tried("an all-reduce", root=tmp_path)
    assert done.returncode == 1 and "survives" in done.stdout
