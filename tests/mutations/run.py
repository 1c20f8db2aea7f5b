"""Puts a fault into a copy of the tree and runs tests there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
DRAWN = Path(__file__).with_name("drawn.toml")
_LINKED = ("benchmarks", "cost_models", "docs", "examples", "tests")
_NO_TESTS = 5  # pytest's exit code where none was collected, as of names of tests that are slow
_COPIED = ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md")


@dataclass(frozen=True)
class Fault:
    """A change that makes autopar wrong.

    Args:
        name: what is wrong with it, in words.
        file: relative to the root.
        old: text that occurs once in the file.
        new: what stands there instead.
        tests: files or folders of the default suite in which some test has to fail; of a drawn fault none where no
            test is known that does.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def faults(file: Path = FAULTS) -> tuple[Fault, ...]:
    """All faults, as a file has them: those written by hand, or those of `DRAWN`, which `tests.mutations.draw` drew."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["faults"]
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)


def fits(fault: Fault) -> bool:
    """Whether the text that a fault replaces still occurs once in its file."""
    path = ROOT / fault.file
    return path.is_file() and path.read_text(encoding="utf-8").count(fault.old) == 1


def caught(fault: Fault, folder: Path, timeout_s: float = 900.0) -> str:
    """The first test that fails with a fault; "" where all pass, or none of them runs by default.

    Args:
        fault: to put in.
        folder: empty; the copy goes there.
        timeout_s: of the tests. A fault that makes them hang counts as caught.
    """
    # With bytecode and compiled loops, which the text of what was not changed still fits.
    shutil.copytree(ROOT / "autopar", folder / "autopar")
    for name in _COPIED:
        shutil.copy(ROOT / name, folder / name)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *fault.tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode in (0, _NO_TESTS):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"exit {done.returncode}"
