"""Order in which each process of a whole run collects: `turned` is where a caller starts. It collects nothing."""

from __future__ import annotations

from pathlib import Path


def turned(tests: Path, number: int, count: int) -> list[str]:
    """Folders and files of all tests, from another one on in each process.

    A process rewrites the assertions of the modules that it comes to first, and reads the bytecode that others wrote.

    Args:
        tests: the folder of all tests.
        number: of the process, from 0.
        count: of processes.
    """
    parts = sorted(str(p) for p in tests.iterdir() if p.match("test_*.py") or (p.is_dir() and p.name[:2] != "__"))
    begin = len(parts) * number // count
    return parts[begin:] + parts[:begin]
