"""The order in which programs reach the devices of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax


class Launches:
    """Lets one program after the other reach the devices.

    Programs of several devices wait for each other on all of them. Two threads that launch two programs at once may
    have one device run the one first and another device the other, and both wait for ever. XLA's CPU devices share a
    pool of threads besides: programs of which neither needs the other's results may each hold a part of the pool and
    wait for the rest. There a program is launched when the one before is done, unless the same thread launches the
    same program again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by: tuple[int, int] | None = None
        self._results: list[Any] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def of(self, program: object) -> Iterator[None]:
        """Holds other programs back; the one before is done where that matters. `launched` goes inside.

        Args:
            program: what is launched.
        """
        with self._lock:
            by = (id(program), threading.get_ident())
            if by != self._by:
                jax.block_until_ready([a for a in self._results if not a.is_deleted()])
            self._by, self._results = by, []
            yield

    def launched(self, results: Sequence[Any]) -> None:
        """Notes results of what was launched, one of each set of CPU devices: programs of a set end with all of theirs.

        Args:
            results: arrays, of which the smallest are kept until something else is launched.
        """
        smallest: dict[frozenset[Any], Any] = {}
        for a in results:
            devices = a.sharding.device_set
            known = smallest.get(frozenset(devices))
            if known is None or a.nbytes < known.nbytes:
                smallest[frozenset(devices)] = a
        self._results = [a for devices, a in smallest.items() if all(d.platform == "cpu" for d in devices)]


#: The devices are those of the process, and so is the lock.
LAUNCHES: Final = Launches()
