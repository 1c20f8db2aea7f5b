"""Parts of the slow tests, one of which continuous integration runs for a commit.

`chosen` is where a caller starts. A part is folders and files; a file belongs to the part with the longest of its
prefixes, so each file is in one part. `recorded` has the tests that passed when they were last run, and their cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: CPU seconds by test of those that passed when they were last run; `python -m tests.shards K --record` adds to it.
RECORDED = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True)
class Part:
    """A part of the slow tests.

    Args:
        name: in the last line of a run.
        prefixes: of the paths of its files.
        environment: the folder of its Python.
    """

    name: str
    prefixes: tuple[str, ...]
    environment: str = ".venv"


#: The number of a part is its place, from 1 on.
PARTS = (
    Part("ray", ("tests/runtime_ray/",)),
    Part("hosts", ("tests/runtime_hosts/",)),
    Part(
        "drawn",
        (
            "tests/end_to_end/test_everything_combined.py",
            "tests/end_to_end/test_pipeline_matrix.py",
            "tests/end_to_end/test_random_plans.py",
            "tests/fuzz/",
            "tests/search/test_random_graphs.py",
        ),
    ),
    Part("end to end", ("tests/end_to_end/",)),
    Part("lowering", ("tests/frontend/", "tests/ir/", "tests/lower/", "tests/microbatch/", "tests/precision/")),
    Part(
        "planning",
        (
            "tests/benchmarks/",
            "tests/cluster/",
            "tests/cost/",
            "tests/schedule/",
            "tests/search/",
            "tests/sharding/",
            "tests/simulate/",
            "tests/solver/",
        ),
    ),
    Part("steps", ("tests/",)),
    Part("public", ("tests/public/",), ".venv-public"),
)


#: Files that one process takes, at most: to start one and to import jax costs as much as many a file.
_FILES = 6


@dataclass(frozen=True)
class Unit:
    """Tests that one process runs: those of ``files`` whose place is ``piece`` of ``pieces`` in turn."""

    files: tuple[str, ...]
    piece: int
    pieces: int


def chosen(commit: str) -> int:
    """Number of the part for a commit's hash, in hexadecimal digits."""
    return int(commit, 16) % len(PARTS) + 1


def part_of(file: str) -> Part:
    """The part of a file, whose path is relative to the root."""
    return max(PARTS, key=lambda part: max((len(p) for p in part.prefixes if file.startswith(p)), default=-1))


def files(part: Part) -> tuple[str, ...]:
    """Files of a part with slow tests."""
    found = (p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "tests").rglob("test_*.py")) if _has_slow(p))
    return tuple(name for name in found if part_of(name) is part)


def recorded(file: Path = RECORDED) -> dict[str, float]:
    """CPU seconds of the tests that passed when they were last run: a failure of these fails continuous integration."""
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def record(passed: Mapping[str, float], failed: frozenset[str], file: Path = RECORDED) -> None:
    """Adds tests that passed, with their CPU seconds, and takes out those that failed."""
    known = {test: seconds for test, seconds in {**recorded(file), **passed}.items() if test not in failed}
    file.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n", encoding="utf-8")


def units(part: Part) -> Iterator[Unit]:
    """The tests of a part, in two pieces a group of files: two processes share the tests of a large file."""
    found = files(part)
    for first in range(0, len(found), _FILES):
        for piece in range(2):
            yield Unit(found[first : first + _FILES], piece, 2)


def _has_slow(path: Path) -> bool:
    """Whether tests of a file are slow by a mark of their own, or by what ``few`` leaves out."""
    text = path.read_text(encoding="utf-8")
    return "mark.slow" in text or "mark.few(" in text
