"""`Board`: memory that the driver and the workers on its machine share, for the instruction that each is at.

A report there is one write into memory: neither side makes a system call, and the driver is not woken. What a process
wrote last stays when it is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from autopar.runtime.ray.machine import machine

_ITEM_BYTES = 8
#: An entry is (step + 1) times this, and the index of the instruction + 1: one word, which is written at once.
_INDICES = 1 << 31


class Board:
    """A row of entries, one for each process. OSError where there is no such memory.

    Args:
        path: of the memory as another process of this machine sees it; empty makes it, with ``processes`` entries.
        processes: number of entries.
    """

    def __init__(self, path: str = "", processes: int = 0) -> None:
        if path:
            # Not waiting: something else may have this name where the driver is gone.
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            handle = os.memfd_create("autopar-board", os.MFD_CLOEXEC)
            os.ftruncate(handle, max(1, processes) * _ITEM_BYTES)
        #: What others of this machine and user open it by: "MACHINE PATH".
        self.name = f"{machine()} /proc/{os.getpid()}/fd/{handle}"
        self._file = os.fdopen(handle, "rb", buffering=0)
        try:
            self._entries = memoryview(mmap.mmap(handle, 0)).cast("q")
        except BaseException:
            self._file.close()
            raise

    def write(self, process: int, step: int, index: int) -> None:
        """Notes the instruction that a process is at."""
        self._entries[process] = (step + 1) * _INDICES + index + 1

    def read(self, process: int) -> tuple[int, int] | None:
        """(step, index) that a process noted last; None where it noted none."""
        entry = self._entries[process] if process < len(self._entries) else 0
        return (entry // _INDICES - 1, entry % _INDICES - 1) if entry else None

    def close(self) -> None:
        """Nobody opens it any more; those who have it go on to read and write."""
        self._file.close()


def made_board(processes: int) -> Board | None:
    """A board for processes; None where the system has no such memory."""
    with contextlib.suppress(OSError, AttributeError):
        return Board(processes=processes)
    return None


def opened_board(name: str) -> Board | None:
    """The board of a name; None where it is on another machine, or of another user."""
    where, _, path = name.rpartition(" ")
    if not path or where != machine():
        return None
    with contextlib.suppress(OSError, ValueError):
        board = Board(path)
        board.close()
        return board
    return None
