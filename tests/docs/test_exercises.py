"""The tutorial's exercises: every solution runs, after those of the page that define what it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/tutorial/exercises.md"
SETUP, *SOLUTIONS = [b for b in blocks(PAGE) if b.language == "python"]
TITLES = re.findall(r"^## (\d+\. .*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)

#: Names at the end of solutions that have run, by number.
Sessions = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory) -> Iterator[Sessions]:
    """Solutions that have run. They share a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("exercises"))
        yield {}


def read_and_written(text: str) -> tuple[set[str], set[str]]:
    """Names that a program reads before it writes them, and names that it writes."""
    read: set[str] = set()
    written: set[str] = set()
    for statement in ast.parse(text).body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        read |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - written
        written |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return read, written


def run(number: int, sessions: Sessions) -> dict[str, Any]:
    """Names at the end of a solution, which runs once, after the last ones that write what it reads."""
    if number not in sessions:
        names: dict[str, Any] = {"__name__": "exercises"}
        exec(compile(SETUP.text, SETUP.page, "exec", dont_inherit=True), names)
        for name in sorted(read_and_written(SOLUTIONS[number].text)[0]):
            writers = [k for k in range(number) if name in read_and_written(SOLUTIONS[k].text)[1]]
            if writers:
                names[name] = run(writers[-1], sessions)[name]
        solution = SOLUTIONS[number]
        exec(compile(solution.text, solution.page, "exec", dont_inherit=True), names)
        sessions[number] = names
    return sessions[number]


#: Solutions that cost 0.7 references of CPU time or more; what they read of others they have run themselves.
LONG = (2, 3, 7, 11)
NUMBERS = [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in range(len(SOLUTIONS))]


@pytest.mark.parametrize("number", NUMBERS, ids=TITLES)
def test_a_solution_runs(number, sessions) -> None:
    run(number, sessions)


def test_there_are_twelve_that_can_fail() -> None:
    assert len(TITLES) == len(SOLUTIONS) == 12
    assert all("assert" in b.text for b in SOLUTIONS)
