"""Processes of this machine that a driver may have left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autopar.runtime.ray.machine import clean_up, exists, titled

WAITS = "import sys, time; file = open(sys.argv[1], 'w'); print('ready', flush=True); time.sleep(100)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(title: str, file: Path, started: list[subprocess.Popen[str]]) -> int:
    command = [title, "-c", WAITS, str(file)]
    process = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process.pid


@pytest.mark.skipif(not psutil.LINUX, reason="open files are read from /proc")
def test_processes_with_a_title_are_found_by_their_files(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """Ray's agents write their title over their environment, and with it the mark."""
    folder, other = tmp_path / "here", tmp_path / "here-too"
    folder.mkdir()
    other.mkdir()
    agent = start("ray::Agent", folder / "log", started)
    reader = start("python", folder / "notes", started)
    elsewhere = start("ray::Agent", other / "log", started)
    assert titled(str(folder)) == [agent]
    clean_up("AUTOPAR_RAY=none", str(folder))
    assert [exists(p) for p in (agent, reader, elsewhere)] == [False, True, True]
    assert not folder.exists()
