"""Measuring in several processes that are joined, as a script that is started on every host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopar.runtime.hosts.supervise import COORDINATOR, CPU_DEVICES, PROCESS, PROCESSES
from benchmarks.report import Row

_ROOT = Path(__file__).resolve().parents[1]


def measured_together(module: str, args: Sequence[str], processes: int, devices: int, limit_s: float) -> Row:
    """What the first process of a module printed last, as JSON.

    Args:
        module: run as ``python -m module`` in every process.
        args: its arguments.
        processes: number of processes.
        devices: virtual CPU devices of all processes together.
        limit_s: seconds that a process may take.
    """
    with processes_together(module, args, processes, devices) as children:
        texts = [child.communicate(timeout=limit_s)[0] for child in children]
    row: Row = json.loads(texts[0].strip().splitlines()[-1])
    return row


@contextmanager
def processes_together(
    module: str, args: Sequence[str], processes: int, devices: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a module that are joined, with pipes for what they read and write; killed at the end.

    Args:
        module: run as ``python -m module`` in every process.
        args: its arguments.
        processes: number of processes.
        devices: virtual CPU devices of all processes together.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment = {**inherited, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu", "AUTOPAR_CACHE_DIR": "off"}
    environment |= {
        COORDINATOR: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        CPU_DEVICES: str(devices // processes),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env={**environment, PROCESS: str(p)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        for p in range(processes)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()
