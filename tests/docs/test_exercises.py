"""The tutorial's exercises: every solution runs, in the order of the page, as in one Python session."""

from __future__ import annotations

import re
import traceback
from typing import Any

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/tutorial/exercises.md"
SETUP, *SOLUTIONS = [b for b in blocks(PAGE) if b.language == "python"]
TITLES = re.findall(r"^## (\d+\. .*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)


def test_every_solution_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "exercises"}
    exec(compile(SETUP.text, SETUP.page, "exec"), names)
    failures = {}
    for title, solution in zip(TITLES, SOLUTIONS, strict=True):
        try:
            exec(compile(solution.text, solution.page, "exec"), names)
        except Exception:
            failures[title] = traceback.format_exc()
    assert not failures, "\n".join(f"{title}\n{text}" for title, text in failures.items())


def test_there_are_twelve_that_can_fail() -> None:
    assert len(TITLES) == len(SOLUTIONS) == 12
    assert all("assert" in b.text for b in SOLUTIONS)
