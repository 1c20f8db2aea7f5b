"""Puts a fault into a copy of the tree and runs tests there until one fails.

`tried` is where a caller starts. Tests run in a process that is forked from one with the libraries loaded (`warm`), so
that a fault whose first test fails costs about two CPU seconds. Nothing here chooses tests: see `tests.mutations.pick`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
DRAWN = Path(__file__).with_name("drawn.toml")
_LINKED = ("cost_models", "docs")
_FOLDERS = ("autopar", "benchmarks", "examples", "tests")
_COPIED = ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md")
_LIBRARIES = (
    "tests.conftest", "jax", "jax.numpy", "highspy", "hypothesis.strategies", "msgspec", "networkx", "numba",
    "numpy.testing", "rich.console", "click.testing", "scipy.optimize", "scipy.sparse",
)  # fmt: skip
_BROKEN = 70  # exit code of a process in which pytest did not end


@dataclass(frozen=True)
class Fault:
    """A change that makes autopar wrong.

    Args:
        name: what is wrong with it, in words.
        file: relative to the root.
        old: text that occurs once in the file.
        new: what stands there instead.
        tests: tests, files or folders of the default suite in which some test has to fail; of a drawn fault none where
            no test is known that does.
        equivalent: of a drawn fault that no test can see, the reason.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def line(self) -> int:
        """The first line of the file that is another with the fault."""
        pairs = enumerate(zip(self.old, self.new, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(self.old), len(self.new)))
        text = (ROOT / self.file).read_text(encoding="utf-8")
        return text.count("\n", 0, text.index(self.old) + same) + 1


@dataclass(frozen=True)
class Outcome:
    """How tests answered a fault.

    Args:
        by: the first test that failed, or "signal N" or "exit N" of a process that ended before one did; "" where all
            passed, or none ran.
        ran: how many tests ran.
        cpu_s: CPU seconds of their process.
    """

    by: str
    ran: int
    cpu_s: float


class Notes:
    """A pytest plugin that keeps some tests, in an order, and writes down how many ran and which failed first.

    Args:
        tests: names of tests, files or folders, in the order in which they run.
        path: of the notes.
    """

    def __init__(self, tests: Sequence[str], path: Path) -> None:
        self.places = {name: place for place, name in enumerate(tests)}
        self.path, self.ran, self.by = path, 0, ""

    def place(self, name: str) -> int | None:
        """The place of a test in the order; None where it was not asked for."""
        file, _, _ = name.partition("::")
        folders = (parent.as_posix() for parent in Path(file).parents)
        places = (self.places.get(part) for part in (name, name.partition("[")[0], file, *folders))
        return next((place for place in places if place is not None), None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests."""
        chosen = [(place, n) for n, item in enumerate(items) if (place := self.place(item.nodeid)) is not None]
        items[:] = [items[n] for _, n in sorted(chosen)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that ended."""
        self.ran += report.when == "call"
        self._note(report.failed, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a file that cannot be imported."""
        self._note(report.failed, report.nodeid)

    def _note(self, failed: bool, name: str) -> None:
        self.by = self.by or (name if failed else "")
        self.path.write_text(json.dumps({"ran": self.ran, "by": self.by}), encoding="utf-8")


def faults(file: Path = FAULTS) -> tuple[Fault, ...]:
    """All faults, as a file has them: those written by hand, or those of `DRAWN`, which `tests.mutations.draw` drew."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["faults"]
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)


def fits(fault: Fault) -> bool:
    """Whether the text that a fault replaces still occurs once in its file."""
    path = ROOT / fault.file
    return path.is_file() and path.read_text(encoding="utf-8").count(fault.old) == 1


def warm() -> None:
    """Loads the libraries that tests need, and nothing of autopar. No thread runs afterwards: forks are safe."""
    for name in _LIBRARIES:
        importlib.import_module(name)


def put(fault: Fault | None, folder: Path) -> None:
    """Makes a copy of the tree with a fault in it.

    Args:
        fault: to put in; None for none.
        folder: empty; the copy goes there.
    """
    # With bytecode and compiled loops, which the text of what was not changed still fits. Tests are copied as well, for
    # some start processes in the folder in which they lie.
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    for name in _COPIED:
        shutil.copy(ROOT / name, folder / name)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    if fault is None:
        return
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def tried(folder: Path, tests: Sequence[str], marked: str = "not slow", limit_s: float = 300.0) -> Outcome:
    """Runs tests in a copy of the tree, in their order, until one fails.

    Args:
        folder: see `put`.
        tests: see `Fault.tests`. Names that are there no more are passed over.
        marked: pytest's ``-m``.
        limit_s: CPU seconds, and a quarter of the wall seconds. A fault that makes tests hang counts as caught.
    """
    names = [name for name in tests if (ROOT / name.partition("::")[0]).exists()]
    if not names:
        return Outcome("", 0, 0.0)
    notes = folder / "notes.json"
    notes.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = _BROKEN
        try:
            code = _run(folder, names, marked, notes, limit_s)
        finally:
            os._exit(code)
    status, usage = _awaited(child, 4 * limit_s)
    found: Mapping[str, Any] = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {"ran": 0, "by": ""}
    by = str(found["by"])
    if not by and os.WIFSIGNALED(status):
        by = f"signal {os.WTERMSIG(status)}"
    elif os.WEXITSTATUS(status) == _BROKEN:
        raise RuntimeError((folder / "output.txt").read_text(encoding="utf-8")[-2000:])
    elif not by and os.WEXITSTATUS(status) not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        by = f"exit {os.WEXITSTATUS(status)}"
    return Outcome(by, int(found["ran"]), usage)


def _awaited(child: int, most_s: float) -> tuple[int, float]:
    """Exit status and CPU seconds of a process, which is killed with all that it started after ``most_s``."""
    until_s = time.monotonic() + most_s
    ended, status, usage = os.wait4(child, os.WNOHANG)
    while not ended and time.monotonic() < until_s:
        time.sleep(0.05)
        ended, status, usage = os.wait4(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started, too
    if not ended:
        _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def _run(folder: Path, tests: Sequence[str], marked: str, notes: Path, limit_s: float) -> int:
    """Pytest's exit code, of this process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
    os.chdir(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, folder.resolve()))]
    os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    for name in [m for m in sys.modules if m.partition(".")[0] == "tests"]:
        del sys.modules[name]
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Texts of assertions are not needed, nor is the order of the suite.
    options = ["-x", "-q", "-n", "0", "-m", marked, "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly"]
    places = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    return int(pytest.main([*options, *places], plugins=[Notes(tests, notes)]))
