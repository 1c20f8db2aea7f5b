"""A pytest plugin: one piece of the tests of a file, none that may take longer than a shard; results line by line.

`tests.shards` loads it in processes that it may end at any time: lines say which tests have begun, and how they ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

#: Seconds of a test's own timeout from which on only `make test-all` runs it.
LONGEST_S = 1800.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--piece K/N`` and ``--results FILE``."""
    parser.addoption("--piece", default="0/1", help="K/N: every Nth test, from the Kth on.")
    parser.addoption("--results", default="", help="A file that gets a line for each test that ended.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the piece."""
    piece, pieces = (int(text) for text in config.option.piece.split("/"))
    ordered = sorted(items, key=lambda item: item.nodeid)
    kept = {item.nodeid for item in ordered[piece::pieces] if _timeout_s(item) < LONGEST_S}
    left = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    config.hook.pytest_deselected(items=left)


def _timeout_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None and mark.args else 0.0


class Results:
    """Writes when each test begins, in which process, and its outcome and CPU seconds.

    Args:
        path: of the file; it is appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A line for a test that begins: a process that dies in it writes no other."""
        self._write({"test": nodeid, "outcome": "begun", "cpu_s": 0.0, "pid": os.getpid()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for what failed, was skipped, or passed, when the test has ended."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.when == "teardown":
            seconds = dict(report.user_properties).get("cpu_s", 0.0)  # see tests/conftest.py
            self._write(
                {"test": report.nodeid, "outcome": self.outcomes.pop(report.nodeid, "skipped"), "cpu_s": seconds}
            )

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Registers `Results`."""
    if config.option.results:
        config.pluginmanager.register(Results(Path(config.option.results)))
