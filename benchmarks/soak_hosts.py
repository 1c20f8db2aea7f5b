"""A pipeline by lists in processes that come and go (4, 2, 3 and again): what they use does not grow.

`examples/train_hosts.py` trains under `autopar run`, a stage in each process. After a while one process is told to end:
all save at the same step and end, and the next number of processes goes on from there. Memory, descriptors and threads
of every process are looked at once its steps have become regular and again before it is told to end.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autopar.runtime.hosts.supervise import AGAIN
from benchmarks.report import Report, Row, Say

MINUTES = 60.0
#: Processes of the parts of a run, one after the other and again; steps before the first look at a process.
COUNTS, SETTLED = (4, 2, 3), 20
#: Bytes and counts by which a process may grow between both looks.
MOST_GROWTH_BYTES, MOST_GROWTH = 32 << 20, 4
#: Seconds that processes may take to start, and to save and end.
_START_S, _END_S = 400.0, 200.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class _Part:
    """A run with one number of processes, as its lines tell.

    Args:
        count: of processes.
        began: step at which they began; -1 before they say.
        steps: steps that ended.
        last: number of the last of them.
        pids: of the processes.
    """

    count: int
    began: int = -1
    steps: int = 0
    last: int = -1
    pids: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        """Takes a line."""
        self.lines.append(text)
        if match := re.match(r"autopar run: process \d: pid (\d+)", text):
            self.pids.append(int(match[1]))
        elif match := re.search(r"begin at step (\d+)", text):
            self.began = int(match[1])
        elif match := re.match(r"step (\d+):", text):
            self.steps, self.last = self.steps + 1, int(match[1])


def used(pids: list[int]) -> dict[str, int]:
    """The most that a process uses."""
    processes = [psutil.Process(pid) for pid in pids]
    return {
        "rss_bytes": max(p.memory_info().rss for p in processes),
        "descriptors": max(p.num_fds() for p in processes),
        "threads": max(p.num_threads() for p in processes),
    }


def train(folder: Path, count: int, seconds: float, draw: random.Random, pause_s: float) -> tuple[_Part, Row]:
    """A part of the run: goes on from the last checkpoint, and saves at its end.

    Args:
        folder: of checkpoints.
        count: of processes, and stages.
        seconds: from the first look to the second.
        draw: chooses the process that is told to end.
        pause_s: seconds between two steps.
    """
    command = [
        sys.executable, "-m", "autopar", "run", "--processes", str(count), "--cpu-devices", "1", "--restarts", "0",
        "--", sys.executable, "-m", "examples.train_hosts", str(folder), "--steps", "1000000", "--every", "1000",
        "--stages", str(count), "--pause", str(pause_s),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "AUTOPAR_CACHE_DIR": "off"}
    part, early = _Part(count), dict[str, int]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_ROOT, env=environment
    ) as job:
        assert job.stdout is not None
        guard = threading.Timer(_START_S + seconds + _END_S, job.kill)
        guard.start()
        due_s, late = 0.0, dict[str, int]()
        for line in job.stdout:
            part.line(line)
            if not early and part.steps == SETTLED:
                early, due_s = used(part.pids), time.monotonic() + seconds
            elif early and not late and time.monotonic() > due_s:
                late = used(part.pids)
                os.kill(draw.choice(part.pids), signal.SIGTERM)
        guard.cancel()
    row: Row = {"processes": count, "from": part.began, "steps": part.steps, "exit code": job.returncode}
    growth = {f"{name}_growth" if "bytes" not in name else "growth_bytes": late.get(name, 0) - early.get(name, 0)
              for name in early}  # fmt: skip
    return part, {**row, **late, **growth}


def run(quick: bool, say: Say, minutes: float = MINUTES, pause_s: float = 0.0) -> Report:
    """Trains by parts until the minutes are over, starts included.

    Args:
        quick: a part with two processes, for two seconds.
        say: takes a line about what is going on.
        minutes: of the whole.
        pause_s: seconds between two steps, at least a fiftieth.
    """
    counts, draw, rows = (2,) if quick else COUNTS, random.Random(0), list[Row]()
    end_s, passed, expected = time.monotonic() + 60 * minutes, True, 0
    notes: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            count = counts[len(rows) % len(counts)]
            seconds = 2.0 if quick else max(20.0, min(300.0, 20 * minutes))
            part, row = train(Path(folder), count, seconds, draw, max(pause_s, 0.02))
            rows.append(row)
            say(f"soak_hosts: {row}")
            grown = [row.get(f"{n}_growth", MOST_GROWTH + 1) for n in ("descriptors", "threads")]
            right = row["exit code"] == AGAIN and part.began == expected and max(grown) <= MOST_GROWTH
            right = right and row.get("growth_bytes", MOST_GROWTH_BYTES + 1) <= MOST_GROWTH_BYTES
            if not right:
                passed, notes = False, (f"last lines with {count} processes:", *part.lines[-20:])
                break
            expected = part.last + 1
            if quick or (time.monotonic() > end_s and len(rows) >= len(counts)):
                break
    target = (
        f"every part goes on where the last ended; no process grows by {MOST_GROWTH_BYTES >> 20} MiB, or by more than"
    )
    return Report("soak_hosts", f"{target} {MOST_GROWTH} descriptors or threads", tuple(rows), passed, notes)
