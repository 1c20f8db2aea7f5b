"""Starts the processes of a small world on this machine, each with CPU devices of its own, and ends them always."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: As in `tests/conftest.py`: programs run once or twice.
FAST = os.environ.get("AUTOPAR_TEST_XLA", "--xla_backend_optimization_level=0")


@dataclass(frozen=True)
class Ended:
    """A process that ended.

    Args:
        code: its exit code.
        result: what its program returned, None where it returned nothing.
        text: what it wrote.
    """

    code: int
    result: Any
    text: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    program: str, process: int, processes: int, port: int, options: dict[str, Any], devices: int, **environment: str
) -> subprocess.Popen[str]:
    """One process that runs a function of `tests.runtime_hosts.programs`."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.lower().endswith("_proxy")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime_hosts.programs", program,
         json.dumps({"process": process, "processes": processes, "port": port, "devices": devices, **options})],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**inherited, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "AUTOPAR_CACHE_DIR": "off",
             "XLA_FLAGS": FAST, **environment},
    )  # fmt: skip


def run(
    program: str,
    processes: int = 2,
    *,
    devices: int = 4,
    limit_s: float = 120.0,
    each: dict[int, dict[str, Any]] | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> list[Ended]:
    """All processes of a world.

    Args:
        program: name of a function of `tests.runtime_hosts.programs`.
        processes: how many.
        devices: of each.
        limit_s: seconds after which they are killed.
        each: further options of single processes.
        environment: further variables.
        options: of the program.
    """
    port = free_port()
    more = environment or {}
    started = [
        start(program, p, processes, port, {**options, **(each or {}).get(p, {})}, devices, **more)
        for p in range(processes)
    ]
    return collect(started, limit_s)


def collect(started: list[subprocess.Popen[str]], limit_s: float) -> list[Ended]:
    """What processes wrote, read from all at once: one whose pipe is full waits, and those that wait for it too."""
    until = time.monotonic() + limit_s

    def ended(process: subprocess.Popen[str]) -> Ended:
        try:
            text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"{process.communicate()[0]}\nkilled after {limit_s} s"
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
        return Ended(process.returncode, result, text)

    try:
        with ThreadPoolExecutor(len(started)) as pool:
            return list(pool.map(ended, started))
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def results(ended: list[Ended]) -> list[Any]:
    """What the programs returned; an assertion with their text where one failed."""
    for n, e in enumerate(ended):
        assert e.code == 0, f"process {n} ended with {e.code}:\n{e.text[-4000:]}"
    return [e.result for e in ended]
