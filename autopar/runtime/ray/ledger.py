"""`Ledger`: which arrays a cluster has, where they lie, and which calls made them. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A step that was asked for.

    Args:
        number: of the step, of all steps of the cluster.
        function: number of the function.
        inputs: number of the array of each input.
        given: arrays among them that the driver sends along.
        results: number of the array of each output.
        orders: by worker that of AMPNet's passes, once it is known: repeated, the call computes the same.
    """

    number: int
    function: int
    inputs: tuple[int, ...]
    given: Mapping[int, Any]
    results: tuple[int, ...]
    orders: tuple[str, ...] = ()


class Ledger:
    """Arrays of a cluster by number, and the calls since they were last copied.

    An array that somebody has a handle to is on workers, or in ``copies``, or made by a call of ``log`` from such.
    """

    def __init__(self) -> None:
        #: Workers that an array lies on.
        self.holders: dict[int, set[int]] = {}
        #: Arrays in the driver's memory.
        self.copies: dict[int, Any] = {}
        #: Calls since the last copy.
        self.log: list[Call] = []
        #: Number of calls of ``log`` that the workers of now have carried out.
        self.position = 0
        self._live: set[int] = set()
        # Handles end in any thread, also in the middle of what is done here.
        self._released: deque[int] = deque()
        self._stale: set[int] = set()
        #: Arrays that workers may have of calls that were given up, and arrays that these calls were to drop.
        self._given_up: set[int] = set()
        self._next_id = 0
        self._steps = 0

    def new_id(self) -> int:
        """A number for an array."""
        self._next_id += 1
        return self._next_id

    def new_step(self) -> int:
        """A number for a step."""
        self._steps += 1
        return self._steps - 1

    def keep(self, id: int) -> None:
        """Somebody has a handle to an array from now on."""
        self._live.add(id)

    def release(self, id: int) -> None:
        """Nobody has a handle any more; may be called at any moment."""
        self._released.append(id)

    @property
    def live(self) -> set[int]:
        """Arrays that somebody has a handle to."""
        while self._released:
            id = self._released.popleft()
            self._live.discard(id)
            self._stale.add(id)
        return self._live

    def drop_stale(self) -> tuple[int, ...]:
        """Arrays on workers that nobody has a handle to; they are forgotten here."""
        live = self.live
        stale = sorted(id for id in self._stale if id in self.holders and id not in live)
        if not self.log:  # no call that would be repeated reads them
            for id in self._stale - live:
                self.copies.pop(id, None)
        self._stale.clear()
        for id in stale:
            del self.holders[id]
        given_up = sorted(self._given_up.difference(stale))
        self._given_up.clear()
        return (*stale, *given_up)

    def give_up(self, call: Call, forget: Iterable[int]) -> None:
        """A call ended without results: workers drop later what it made, and what it was to have them drop.

        Args:
            call: the call.
            forget: what `drop_stale` returned for it.
        """
        self._given_up.update(call.results, forget)

    @property
    def pending(self) -> int:
        """Calls that the workers of now have not carried out."""
        return len(self.log) - self.position

    def needed(self) -> list[int]:
        """Arrays to be kept: those with a handle, and inputs of pending calls but for what such calls make."""
        wanted = set(self.live)
        for call in self.log[self.position :]:
            wanted.update(call.inputs)
        return sorted(wanted & (self.holders.keys() | self.copies.keys()))

    def copied(self, copies: dict[int, Any]) -> None:
        """Keeps host copies of arrays, from which a lost worker is restored; calls made so far are not repeated then.

        Args:
            copies: by number of an array its copy, of all that is `needed`.
        """
        self.copies = copies
        del self.log[: self.position]
        self.position = 0

    def workers_lost(self) -> None:
        """Nothing lies on workers any more."""
        self._given_up.clear()
        self.holders.clear()
        self.position = 0

    def replayed(self) -> None:
        """The first pending call was carried out; what nobody has a handle to is stale once all are."""
        self.position += 1
        if not self.pending:
            self._stale.update(self.holders.keys() - self.live)

    def held_by(self, ids: Iterable[int], workers: Iterable[int]) -> None:
        """Notes which workers hold some arrays."""
        for id in ids:
            self.holders.setdefault(id, set()).update(workers)

    def can_be_had(self, id: int) -> bool:
        """Whether an array is somewhere, or made by a call that can be repeated."""
        return id in self.holders or id in self.copies or any(id in c.results for c in self.log)
