from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.shards import __main__ as shards
from tests.shards.parts import PARTS, ROOT, Unit, chosen, files, part_of, units

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
    return {line["test"].rpartition("::")[2]: line["outcome"] for line in lines}


def test_pieces_are_all_tests_but_those_of_hours(tmp_path) -> None:
    results, file = tmp_path / "results", written(tmp_path, 5)
    first = shards.run(PYTHON, Unit((file,), 0, 2), results, "1", time.monotonic() + 600)
    kept = set(outcomes(results))
    assert first == shards.run(PYTHON, Unit((file,), 1, 2), results, "1", time.monotonic() + 600) == "passed"
    names = {*(f"test_holds[{n}]" for n in range(5)), "test_waits"}
    assert kept < names == set(outcomes(results)) and set(outcomes(results).values()) == {"passed"}


def test_tests_are_ended_with_the_time(tmp_path) -> None:
    results, file = tmp_path / "results", written(tmp_path, 5, 600.0)
    assert shards.run(PYTHON, Unit((file,), 0, 1), results, "1", time.monotonic() + 4) == "cut"
    assert shards.run(PYTHON, Unit((file,), 0, 1), results, "1", time.monotonic() - 1) == "cut"
    assert "test_waits" not in outcomes(results)


def test_a_failing_test_fails_the_run_and_the_last_line_names_the_part(tmp_path, monkeypatch) -> None:
    file = written(tmp_path, 4)
    monkeypatch.setattr(shards, "units", lambda part: iter([Unit((file,), 0, 1)]))
    done = CliRunner().invoke(shards.main, ["2", "--minutes", "10"])
    assert done.exit_code == 1 and "5 passed, 1 failed" in done.output and "FAILED" in done.output
    assert done.output.splitlines()[-1].startswith("shard 2 (hosts): FAILED")
    assert "make test-shard SHARD=2" in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "code", "word"), [("passed", 0, "passed"), ("cut", 0, "passed"), ("failed", 1, "FAILED")]
)
def test_a_part_that_does_not_gate_is_reported(monkeypatch, how, code, word) -> None:
    monkeypatch.setattr(shards, "units", lambda part: iter([Unit(("test_of_no_folder.py",), 0, 1)]))
    monkeypatch.setattr(shards, "run", lambda *arguments: how)
    parts = (PARTS[0], replace(PARTS[1], gates=False), replace(PARTS[2], gates=True), *PARTS[3:])
    monkeypatch.setattr(shards, "PARTS", parts)
    for number, name in ((2, "hosts"), (3, "drawn")):
        done = CliRunner().invoke(shards.main, [str(number), "--minutes", "10"])
        assert done.exit_code == code
        assert done.output.splitlines()[-1].startswith(f"shard {number} ({name}): {word}")
    reported = CliRunner().invoke(shards.main, ["2", "--minutes", "10", "--report"])
    assert (reported.exit_code, "does not gate yet" in reported.output) == (0, code == 1)
    assert CliRunner().invoke(shards.main, ["3", "--minutes", "10", "--report"]).exit_code == code


def test_an_environment_that_cannot_be_made_fails_the_part(monkeypatch) -> None:
    parts = (*PARTS[:7], replace(PARTS[7], environment=".venv-of-no-target", gates=False))
    monkeypatch.setattr(shards, "PARTS", parts)
    done = CliRunner().invoke(shards.main, ["8"])
    assert (done.exit_code, ".venv-of-no-target cannot be made" in done.output) == (1, True)
    assert CliRunner().invoke(shards.main, ["8", "--report"]).exit_code == 0
