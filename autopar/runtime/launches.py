"""Compiled programs on the devices of this process: how they are called, and the order in which they reach devices.

`runnable` is the callable of a program; `LAUNCHES` lets one program after the other reach the devices.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import jax

from autopar._compat.dtypes import SUB_BYTE


class Launches:
    """Lets one program after the other reach the devices.

    Programs of several devices wait for each other on all of them. Two threads that launch two programs at once may
    have one device run the one first and another device the other, and both wait for ever. XLA's CPU devices share a
    pool of threads besides: programs of which neither needs the other's results may each hold a part of the pool and
    wait for the rest. There a program is launched when the one before is done, unless the same thread launches the
    same program again.

    The same program is launched again when the launch before the last is done. XLA's client lets 32 programs of a CPU
    device be under way; the next one waits for its turn in a thread of the pool that the first of them needs, once for
    each device, and all of them stand still (so do those of a jitted function). Two are enough: programs of several CPU
    devices run one after another, and the second is ready when the first ends. The other thirty are left to programs
    that users launch between two steps.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by: tuple[weakref.ref[Any], int] | None = None
        self._results: list[Any] = []
        self._last: dict[frozenset[Any], Any] = {}

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def of(self, program: object) -> Iterator[None]:
        """Holds other programs back; the one before is done where that matters. `launched` goes inside.

        Args:
            program: what is launched. One that is gone is no other one, though Python may give its `id` again.
        """
        with self._lock:
            thread = threading.get_ident()
            if self._by is None or self._by[0]() is not program or self._by[1] != thread:
                _wait([a for a in self._results if not a.is_deleted()])
            self._by, self._results = (weakref.ref(program), thread), []
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

    def follow(self, devices: frozenset[Any], results: Sequence[Any]) -> None:
        """Waits for the launch on some devices before the one that makes ``results``, for this one if that is given up.

        Args:
            devices: of this process, on which the program runs.
            results: arrays, of which the smallest is kept.
        """
        if len(devices) < 2 or not results:
            return
        result = min(results, key=lambda a: a.nbytes)
        before, self._last[devices] = self._last.get(devices), result
        if before is not None:
            _wait([result if before.is_deleted() else before])


def _wait(arrays: Sequence[Any]) -> None:
    """Waits for the programs that make some arrays. Whoever reads the results of one that failed gets its error."""
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:  # the others may not be there yet
        for array in arrays:
            with suppress(jax.errors.JaxRuntimeError):
                array.block_until_ready()


def few_at_once(devices: Iterable[Any]) -> frozenset[Any]:
    """Devices whose programs are launched few at a time: the given ones if they are several CPU devices, or none.

    Args:
        devices: of this process, on which a program runs.
    """
    here = frozenset(devices)
    return here if len(here) > 1 and all(d.platform == "cpu" for d in here) else frozenset()


#: The devices are those of the process, and so is the lock.
LAUNCHES: Final = Launches()


@dataclass(frozen=True, eq=False)
class Jitted:
    """A program that jax's jitted function runs, not its compiled object.

    Args:
        function: jitted.
        compiled: what `jax.stages.Lowered.compile` made of it.
    """

    function: Any
    compiled: Any

    def __call__(self, *arrays: Any) -> Any:
        """Runs the program."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.function(*arrays)

    def as_text(self) -> str:
        """Optimized HLO of the program."""
        return str(self.compiled.as_text())

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results."""
        return self.compiled.out_info

    def memory_analysis(self) -> Any:
        """jax's memory statistics."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """jax's cost statistics."""
        return self.compiled.cost_analysis()


def runnable(function: Any, compiled: Any, dtypes: Sequence[Any]) -> Any:
    """The callable of a program: ``compiled``, or ``function`` where jax's compiled object refuses its own inputs.

    jax's compiled objects take no arrays of a dtype smaller than a byte: they compare the packed layout of the
    compiler with the layout of the array, which does not say how it is packed.

    Args:
        function: jitted.
        compiled: jax's compiled object.
        dtypes: of the program's inputs.
    """
    packed = any(getattr(d, "name", "") in SUB_BYTE for d in dtypes)
    return Jitted(function, compiled) if packed else compiled
