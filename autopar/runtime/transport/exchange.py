"""Timed transfers over the links of a pipeline, as `autopar.cost.links` wants them.

All who take part call `TimedExchange.run` with the same arguments. One side's clock is enough: the first worker stops
it when an array is back, or when all answers are there. Every array that is timed is new on its devices, as one that a
program has just made: jax keeps the copy on the host of one that was sent before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cost.links import How
from autopar.runtime.transport.base import WorkerLink

_AXIS = "x"
_ITEM_BYTES = 4
#: Small arrays go to and fro several times under one look at the clock: as often as makes this many bytes.
_BOUNCED_BYTES, _MOST_RUNS = 1 << 20, 16
#: Tags of what is not timed; tags of sizes are 0, 1, ...
_READY, _ANSWER = 1 << 20, 1 << 21


class TimedExchange:
    """One worker's part in timed transfers.

    Args:
        me: its number.
        link: its connections.
        devices: its devices.
        clock: seconds.
    """

    def __init__(
        self, me: int, link: WorkerLink, devices: Sequence[jax.Device], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._me = me
        self._link = link
        self._devices = devices
        self._clock = clock

    def run(
        self, how: How, workers: Sequence[int], sizes: Sequence[int], lanes: int, count: int
    ) -> tuple[tuple[float, ...], bool]:
        """Takes part.

        Args:
            how: what is done.
            workers: those who take part; the first begins.
            sizes: bytes of an array, one after the other.
            lanes: on how many devices an array lies, at both ends.
            count: arrays of a chain.

        Returns the seconds of each size, of the first worker only, and whether all arrived that should.

        Raises:
            PeerLostError: a connection broke.
            SilentPeerError: another worker sent nothing until the deadline.
        """
        if self._me not in workers:
            return (), True
        sharding = NamedSharding(Mesh(np.array(self._devices[:lanes], dtype=object), (_AXIS,)), PartitionSpec(_AXIS))
        first, *others = workers
        # Who begins waits for the others: a call reaches them at different times.
        for other in others if self._me == first else ():
            self._link.receive(other, _READY, None)
        if self._me != first:
            self._answer(first, _READY)
        seconds: list[float] = []
        equal = True
        for tag, size in enumerate(sizes):
            wanted = payload(size, lanes)
            match how, self._me == first:
                case "bounce", True:
                    took, came = self._bounce(others[0], tag, wanted, sharding)
                case "bounce", False:
                    took, came = self._bounce_back(first, tag, wanted, sharding)
                case "fan", True:
                    took, came = self._begin([(w, tag) for w in others], others, wanted, sharding), wanted
                case "fan", False:
                    took, came = 0.0, self._end(first, first, tag, 1, sharding)
                case "chain", True:
                    took = self._begin([(others[0], tag)] * count, others[-1:], wanted, sharding)
                    came = wanted
                case _:
                    at = workers.index(self._me)
                    following = workers[at + 1] if at + 1 < len(workers) else None
                    took, came = 0.0, self._pass_on(workers[at - 1], following, first, tag, count, sharding)
            seconds.append(took)
            equal = equal and np.array_equal(np.asarray(came), wanted)
        return tuple(seconds) if self._me == first else (), equal

    def _bounce(self, to: int, tag: int, wanted: Any, sharding: NamedSharding) -> tuple[float, Any]:
        array = _fresh(wanted, sharding)
        runs = _runs(wanted.nbytes)
        start = self._clock()
        for _ in range(runs):
            self._link.send(to, tag, array)
            array = jax.block_until_ready(self._link.receive(to, tag, sharding))
        return (self._clock() - start) / (2 * runs), array

    def _bounce_back(self, to: int, tag: int, wanted: Any, sharding: NamedSharding) -> tuple[float, Any]:
        array: Any = None
        for _ in range(_runs(wanted.nbytes)):
            array = self._link.receive(to, tag, sharding)
            self._link.send(to, tag, array)
        return 0.0, array

    def _begin(
        self, sent: Sequence[tuple[int, int]], answering: Sequence[int], wanted: Any, sharding: NamedSharding
    ) -> float:
        arrays = [_fresh(wanted, sharding) for _ in sent]
        start = self._clock()
        for (to, tag), array in zip(sent, arrays, strict=True):
            self._link.send(to, tag, array)
        for worker in answering:
            self._link.receive(worker, _ANSWER, None)
        return self._clock() - start

    def _end(self, source: int, first: int, tag: int, count: int, sharding: NamedSharding) -> Any:
        came = [self._link.receive(source, tag, sharding) for _ in range(count)]
        jax.block_until_ready(came)
        self._answer(first, _ANSWER)
        return came[-1]

    def _pass_on(
        self, source: int, following: int | None, first: int, tag: int, count: int, sharding: NamedSharding
    ) -> Any:
        if following is None:
            return self._end(source, first, tag, count, sharding)
        array: Any = None
        for _ in range(count):
            array = self._link.receive(source, tag, sharding)
            self._link.send(following, tag, array)
        return array

    def _answer(self, to: int, tag: int) -> None:
        self._link.send(to, tag, np.zeros(1, np.int32))


def even_bytes(size: int, lanes: int) -> int:
    """The most bytes up to ``size``, and at least one number a device, that ``lanes`` devices can share evenly."""
    least = _ITEM_BYTES * lanes
    return max(1, size // least) * least


def payload(size: int, lanes: int) -> np.ndarray[Any, Any]:
    """The contents of a transfer: numbers that tell where they belong.

    Args:
        size: bytes, about: see `even_bytes`.
        lanes: number of devices.
    """
    return np.arange(even_bytes(size, lanes) // _ITEM_BYTES, dtype=np.int32) + np.int32(size)


def _fresh(host: Any, sharding: NamedSharding) -> Any:
    # A copy: on CPUs a device takes over the memory that it is given.
    return jax.block_until_ready(jax.device_put(host.copy(), sharding))


def _runs(size: int) -> int:
    return max(1, min(_MOST_RUNS, _BOUNCED_BYTES // size))
