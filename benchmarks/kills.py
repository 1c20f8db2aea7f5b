"""Processes of one script under `autopar run`, killed and told to end at random, next to the same run left alone.

Each SIGKILL or SIGTERM goes to one process of `examples/train_hosts.py`, some steps after the last start. Every second
strike is a SIGKILL while a step runs: the processes carry out a pipeline by lists, and those that are left wait in a
send. The parameters at the end are equal to the bit, and neither processes nor unfinished checkpoints are left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Row, Say

KILLS = 30
_ROOT = Path(__file__).resolve().parents[1]
#: Variable by which the processes of a run are known.
_MARK = "AUTOPAR_KILLS_RUN"
#: Seconds that a killed run may take: to begin with, and for each kill.
_BASE_S, _KILL_S = 300.0, 100.0
#: Seconds after the end in which processes may be on their way out.
_LEAVE_S = 10.0
_BEGINS = re.compile(r"step (\d+) begins")
_PID = re.compile(r"autopar run: process (\d): pid (\d+)")


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        code: exit code of the supervisor.
        text: what all processes wrote.
        given: names of the signals, in order.
        inside: how many of them came while a step ran.
        alive: processes that are left.
        result: what the script wrote at its end.
        checkpoints: names in its folder of checkpoints.
        seconds: wall.
    """

    code: int
    text: str
    given: tuple[str, ...]
    inside: int
    alive: tuple[int, ...]
    result: dict[str, object]
    checkpoints: tuple[str, ...]
    seconds: float


class _Strikes:
    """Decides after each line of a run whether a process is struck.

    Args:
        kills: how many are.
        seed: of the moments, victims and signals.
    """

    def __init__(self, kills: int, seed: int) -> None:
        self._kills, self._chance = kills, random.Random(seed)
        self._pids: dict[int, int] = {}
        self._steps = 0
        self._began_s = 0.0
        self._step_s = 0.1
        self._struck = ""
        self.given: list[str] = []
        self.inside = 0

    def line(self, text: str) -> None:
        """Takes a line of a run's output."""
        if match := _PID.match(text):
            self._pids[int(match[1])] = int(match[2])
            self._steps = self._chance.randint(1, 6)
            self.inside += bool(self._struck)  # no end of the step was heard of
            self._struck = ""
        elif match := _BEGINS.match(text):
            self._began_s = time.monotonic()
            if self._is_due(inside=True):
                time.sleep(self._chance.random() * self._step_s)
                self._strike(signal.SIGKILL)
                self._struck = f"step {match[1]}:"
        elif text.startswith("step"):
            self._step_s = time.monotonic() - self._began_s
            if self._struck and text.startswith(self._struck):
                self._struck = ""
            self._steps -= 1
            if self._is_due(inside=False):
                time.sleep(self._chance.random() * 0.3)
                self._strike(self._chance.choice([signal.SIGKILL, signal.SIGTERM]))

    def _is_due(self, *, inside: bool) -> bool:
        return self._steps == 0 and len(self.given) < self._kills and inside == (len(self.given) % 2 == 0)

    def _strike(self, kind: signal.Signals) -> None:
        self._steps = -1
        self.given.append(kind.name)
        os.kill(self._chance.choice(sorted(self._pids.values())), kind)


def train(folder: Path, steps: int, kills: int, seed: int = 0, processes: int = 2) -> Outcome:
    """Runs the script under the supervisor.

    Args:
        folder: of its checkpoints.
        steps: of the training.
        kills: processes that are struck on the way.
        seed: of the moments, victims and signals.
        processes: of the script.
    """
    folder.mkdir()
    mark = uuid.uuid4().hex
    command = [
        sys.executable, "-m", "autopar", "run", "--processes", str(processes), "--cpu-devices", "2",
        "--heartbeat", "3", "--restarts", str(2 * kills + 2), "--",
        sys.executable, "-m", "examples.train_hosts", str(folder), "--steps", str(steps), "--pause", "0.1",
        "--stages", "2", "--begins",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "AUTOPAR_CACHE_DIR": "off", _MARK: mark}
    begin = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_ROOT, env=environment
    )
    guard = threading.Timer(_BASE_S + _KILL_S * kills, child.kill)
    guard.start()
    strikes = _Strikes(kills, seed)
    lines: list[str] = []
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.append(line)
            strikes.line(line)
    code = child.wait()
    guard.cancel()
    seconds = time.monotonic() - begin
    file = folder / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    names = tuple(sorted(p.name for p in (folder / "checkpoints").iterdir()))
    return Outcome(code, "".join(lines), tuple(strikes.given), strikes.inside, _left(mark), result, names, seconds)


def _left(mark: str) -> tuple[int, ...]:
    """Processes of a run that have not ended a while after it."""
    until = time.monotonic() + _LEAVE_S
    while (alive := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return alive


def _marked(mark: str) -> tuple[int, ...]:
    wanted = f"{_MARK}={mark}".encode()
    alive = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                alive.append(int(folder.name))
        except OSError:
            continue  # it ended, or is another user's
    return tuple(alive)


def run(quick: bool, say: Say, kills: int = KILLS) -> Report:
    """Trains under kills and without.

    Args:
        quick: two kills.
        say: takes a line about what is going on.
        kills: how many.
    """
    kills = 2 if quick else kills
    steps = 10 + 8 * kills  # a strike comes 3.5 steps after a start on average, and some steps are run again
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {}
        for name, count in (("left alone", 0), ("killed", kills)):
            say(f"{steps} steps in two processes, {count} kills")
            outcomes[name] = done = train(Path(folder, name.replace(" ", "-")), steps, count)
            rows.append(
                {
                    "run": name,
                    **{kind: Counter(done.given)[kind] for kind in ("SIGKILL", "SIGTERM")},
                    "in a step": done.inside,
                    "starts": done.text.count("process 0: pid"),
                    "exit code": done.code,
                    "processes left": len(done.alive),
                    "checkpoints": " ".join(done.checkpoints),
                    "parameters": str(done.result.get("digest", "none"))[:16],
                    "run_s": done.seconds,
                }
            )
    plain, killed = outcomes["left alone"], outcomes["killed"]
    whole = all(o.code == 0 and not o.alive and all(n.isdigit() for n in o.checkpoints) for o in outcomes.values())
    passed = whole and len(killed.given) == kills and bool(plain.result) and plain.result == killed.result
    passed = passed and killed.inside >= kills // 3
    notes = () if passed else ("last lines of the killed run:", *killed.text.splitlines()[-20:])
    target = "parameters equal to the bit, a third of the kills in a step, no processes, no unfinished checkpoints left"
    return Report("kills", target, tuple(rows), passed, notes, measured=("run_s",))
