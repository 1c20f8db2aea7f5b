from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.shards import __main__ as shards
from tests.shards.parts import PARTS, ROOT, Unit, chosen, files, part_of, record, recorded, units

PYTHON = Path(sys.executable)
TESTS = """
import time
import pytest
pytestmark = pytest.mark.slow

@pytest.mark.parametrize("n", range(5))
def test_holds(n):
    assert n < LESS

def test_waits():
    time.sleep(SECONDS)

@pytest.mark.timeout(3600)
def test_takes_an_hour():
    raise AssertionError("it is left to make test-all")
"""


def test_each_file_with_slow_tests_is_in_one_part() -> None:
    found = [file for part in PARTS for file in files(part)]
    texts = {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "tests").rglob("test_*.py")}
    slow = {name for name, text in texts.items() if "mark.slow" in text or "mark.few(" in text}
    assert len(found) == len(set(found)) and set(found) == slow
    assert all(files(part) for part in PARTS)
    for part in PARTS:
        pieces = [unit.piece for unit in units(part) for _ in unit.files]
        assert sorted(f for unit in units(part) for f in unit.files) == sorted(2 * files(part))
        assert pieces.count(0) == pieces.count(1)
    assert part_of("tests/public/test_steps.py").environment == ".venv-public"


def test_a_commit_chooses_each_part_alike() -> None:
    assert {chosen(f"{n:040x}") for n in range(8)} == set(range(1, len(PARTS) + 1))


def written(folder: Path, less: int, seconds: float = 0.0) -> str:
    path = folder / "test_drawn.py"
    path.write_text(TESTS.replace("LESS", str(less)).replace("SECONDS", str(seconds)))
    return str(path)


def outcomes(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [line for line in lines if line["outcome"] != "begun"]
    assert all(line["cpu_s"] >= 0.0 for line in lines)
    return {line["test"].rpartition("::")[2]: line["outcome"] for line in lines}


@pytest.mark.slow
def test_pieces_are_all_tests_but_those_of_hours(tmp_path) -> None:
    results, file = tmp_path / "results", written(tmp_path, 5)
    first = shards.run(PYTHON, Unit((file,), 0, 2), results, "1", time.monotonic() + 600)
    kept = set(outcomes(results))
    assert first == shards.run(PYTHON, Unit((file,), 1, 2), results, "1", time.monotonic() + 600) == "passed"
    names = {*(f"test_holds[{n}]" for n in range(5)), "test_waits"}
    assert kept < names == set(outcomes(results)) and set(outcomes(results).values()) == {"passed"}


@pytest.mark.slow
def test_tests_are_ended_with_the_time(tmp_path) -> None:
    results, file = tmp_path / "results", written(tmp_path, 5, 600.0)
    assert shards.run(PYTHON, Unit((file,), 0, 1), results, "1", time.monotonic() + 4) == "cut"
    assert shards.run(PYTHON, Unit((file,), 0, 1), results, "1", time.monotonic() - 1) == "cut"
    assert "test_waits" not in outcomes(results)


@pytest.mark.slow
@pytest.mark.parametrize(("known", "code"), [(True, 1), (False, 0)])
def test_the_test_in_which_a_process_dies_fails(tmp_path, monkeypatch, known, code) -> None:
    """A timeout ends the process, which writes no outcome: it counts like any other failure of that test."""
    file = tmp_path / "test_drawn.py"
    file.write_text("import os\nimport pytest\n\n@pytest.mark.slow\ndef test_dies():\n    os._exit(1)\n")
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(shards, "units", lambda part: iter([Unit((file.name,), 0, 1)]))
    monkeypatch.setattr(shards, "recorded", lambda: {"test_drawn.py::test_dies": 1.0} if known else {})
    done = CliRunner().invoke(shards.main, ["2", "--minutes", "10", "--report"])
    assert "FAILED test_drawn.py::test_dies" in done.output and "0 passed, 1 failed" in done.output
    assert done.exit_code == code


@pytest.mark.slow
def test_a_failing_test_fails_the_run_and_the_last_line_names_the_part(tmp_path, monkeypatch) -> None:
    file = written(tmp_path, 4)
    monkeypatch.setattr(shards, "units", lambda part: iter([Unit((file,), 0, 1)]))
    done = CliRunner().invoke(shards.main, ["2", "--minutes", "10"])
    assert done.exit_code == 1 and "5 passed, 1 failed" in done.output and "FAILED" in done.output
    assert done.output.splitlines()[-1].startswith("shard 2 (hosts): FAILED")
    assert "make test-shard SHARD=2" in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("failing", "known", "code", "code_of_report"), [(0, True, 0, 0), (1, True, 1, 1), (1, False, 1, 0)]
)
def test_a_failure_of_a_test_that_is_known_to_pass_fails_the_run(
    tmp_path, monkeypatch, failing, known, code, code_of_report
) -> None:
    def ran(python, unit, results, seed, until_s):
        with results.open("a") as file:
            for n in range(2):
                outcome = "failed" if n < failing else "passed"
                file.write(json.dumps({"test": f"tests/a.py::test[{n}]", "outcome": outcome, "cpu_s": 2.0}) + "\n")
        return "failed" if failing else "passed"

    monkeypatch.setattr(shards, "units", lambda part: iter([Unit(("tests/a.py",), 0, 1)]))
    monkeypatch.setattr(shards, "run", ran)
    monkeypatch.setattr(shards, "recorded", lambda: {"tests/a.py::test[0]": 1.0} if known else {})
    for arguments, expected in (([], code), (["--report"], code_of_report)):
        done = CliRunner().invoke(shards.main, ["2", "--minutes", "10", *arguments])
        assert done.exit_code == expected, done.output
        assert done.output.splitlines()[-1].startswith(f"shard 2 (hosts): {'FAILED' if failing else 'passed'}")
        assert f"{2 - failing} passed, {failing} failed, 0 skipped, 4 CPU s" in done.output


def test_a_process_that_fails_without_a_failing_test_fails_the_run(monkeypatch) -> None:
    monkeypatch.setattr(shards, "units", lambda part: iter([Unit(("tests/a.py",), 0, 1)]))
    for how, code in (("failed", 1), ("cut", 0)):
        monkeypatch.setattr(shards, "run", lambda *arguments, how=how: how)
        assert CliRunner().invoke(shards.main, ["2", "--minutes", "10", "--report"]).exit_code == code


def test_what_passed_is_recorded_with_its_cost(tmp_path) -> None:
    file = tmp_path / "recorded.json"
    record({"b": 2.0, "a": 1.5}, frozenset(), file)
    record({"c": 3.0}, frozenset({"b"}), file)
    assert recorded(file) == {"a": 1.5, "c": 3.0}
    names = {name.partition("::")[0] for name in recorded()}
    assert all((ROOT / name).exists() for name in names)  # else: python -m tests.shards K --record


def test_an_environment_that_cannot_be_made_fails_the_part(monkeypatch) -> None:
    parts = (*PARTS[:-1], replace(PARTS[-1], environment=".venv-of-no-target"))
    monkeypatch.setattr(shards, "PARTS", parts)
    done = CliRunner().invoke(shards.main, ["8"])
    assert (done.exit_code, ".venv-of-no-target cannot be made" in done.output) == (1, True)
    assert CliRunner().invoke(shards.main, ["8", "--report"]).exit_code == 0
