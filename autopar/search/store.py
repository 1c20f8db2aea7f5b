"""`Store`: everything that the problems of one search state, solve and plan once, by key.

`Store.key` makes all keys, `Room.answers` is the one rule of dominance:

    an answer that needs no more than a smaller room holds is the answer in the smaller room,
    an answer in a smaller room is the answer where one in a larger room is faster by no more than a gap,
    where nothing was found, nothing is found in a smaller room,
    a solution whose bound is below two cutoffs is the same by both: neither has ended its search.

Answers follow from their keys and rooms, so no plan depends on what is kept. A store counts the work of an answer once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph
from autopar.ir.text import graph_digest
from autopar.plan import PlanContent
from autopar.search.outcome import Bounded
from autopar.simulate.memory import lasting_bytes
from autopar.solver.meter import Meter
from autopar.solver.solution import Solution

#: Numbers in arrays beyond which the answers are dropped that were not asked for for longest: 400 MB.
_MOST_ENTRIES = 50_000_000
#: Numbers that take as many bytes as a record of a plan does: half a kilobyte.
_NUMBERS_OF_RECORD = 64

Value = TypeVar("Value")


@dataclass(frozen=True)
class Same:
    """A value in a key that equals nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Key:
    """Identity of an answer whatever its room.

    Args:
        what: kind of answer.
        graph: digest of the graph, with its names.
        of: everything else that the answer depends on. Texts of these parts, or their ``digest``, are the same in every
            process; a digest is None where something is a user's own.
    """

    what: str
    graph: str
    of: tuple[Hashable, ...]

    @property
    def text(self) -> str | None:
        """Name of the answer in every process; None where something is a user's own."""
        parts = [getattr(part, "digest", part) for part in self.of]
        return None if any(part is None for part in parts) else " ".join(map(str, (self.what, self.graph, *parts)))


@dataclass(frozen=True)
class Room:
    """Room that an answer has to fit into.

    Args:
        limit_bytes: bytes a device.
        in_flight: microbatches in flight besides the one that runs, whose activations the device holds.
        others: stages besides this one whose lasting bytes the device holds.
        cutoff_s: seconds that the answer has to stay below to be of use.
    """

    limit_bytes: float = math.inf
    in_flight: int = 0
    others: int = 0
    cutoff_s: float = math.inf

    def answers(self, value: object, asked: Room, *, any_that_fits: bool) -> bool:
        """Whether the answer of this room answers another: the one rule of dominance.

        Args:
            value: the answer.
            asked: the other room.
            any_that_fits: whether any answer that fits will do.
        """
        if isinstance(value, Solution):
            return self == asked or value.lower_bound <= min(self.cutoff_s, asked.cutoff_s)
        if not isinstance(value, PlanContent):
            return self.is_as_large(asked) and asked.cutoff_s <= self.cutoff_s
        return asked.has(value) and (self.is_as_large(asked) or any_that_fits)

    def is_as_large(self, other: Room) -> bool:
        """Whether whatever fits into another room fits into this one."""
        more = (-self.limit_bytes, self.in_flight, self.others), (-other.limit_bytes, other.in_flight, other.others)
        return all(here <= there for here, there in zip(*more, strict=True))

    def has(self, content: PlanContent) -> bool:
        """Whether a plan of one stage fits into the room."""
        stage = content.stages[0]
        held = self.in_flight * stage.activation_bytes + self.others * lasting_bytes(stage)
        return content.peak_memory + held <= self.limit_bytes


@dataclass
class _Entry:
    """An answer.

    Args:
        value: the answer, or the error that says why there is none.
        room: that it was found in.
        meter: its work, until that is counted.
        text: its key as text that is the same in every process; None where a part is an object of the user.
        takers: who asked for it.
        numbers: that take as many bytes as the answer.
    """

    value: Any
    room: Room
    meter: Meter
    text: str | None
    takers: set[Hashable] = field(default_factory=set)
    numbers: int = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = _numbers(self.value)


@dataclass(eq=False)
class Store:
    """Answers of one search. Another process begins with none: a store is pickled empty.

    Args:
        answers: by key, the one that was asked for last at the end.
        parts: of keys that have a digest: equal ones are one.
        lock: held while something is looked up or kept: relaxations run in a thread while the next mesh is stated.
        numbers: that take as many bytes as the answers.
    """

    answers: OrderedDict[Key, list[_Entry]] = field(default_factory=OrderedDict)
    parts: dict[Hashable, Hashable] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    numbers: int = field(default=0, init=False)

    def key(self, what: str, graph: Graph | None, *of: Hashable) -> Key:
        """Key of an answer.

        Args:
            what: kind of answer.
            graph: that it is about; None where it is about none.
            of: everything else that it depends on.
        """
        # A digest is made where an answer is kept: the class says whether there is one.
        of = tuple(self.parts.setdefault(part, part) if hasattr(type(part), "digest") else part for part in of)
        return Key(what, "" if graph is None else graph_digest(graph), of)

    def get(self, key: Key, default: Value) -> Value:
        """An answer that needs no room; ``default`` where it is not there."""
        with self.lock:
            entries = self.answers.get(key)
        return entries[0].value if entries else default

    def once(self, key: Key, make: Callable[[], Value]) -> Value:
        """An answer that needs no room, made if it is not there. Its work counts for whoever makes it."""
        return self.counted(key, None, lambda _: make())

    def counted(self, key: Key, meter: Meter | None, make: Callable[[Meter], Value], room: Room = Room()) -> Value:
        """An answer, made if it is not there; its work counts for each who asks, once in a search.

        Args:
            key: of the answer.
            meter: of who asks.
            make: makes it, and counts its work.
            room: memory and microbatches in flight that it has to fit into.
        """
        with self.lock:
            every = self.answers.get(key, ())
            entry = next((e for e in every if e.room.answers(e.value, room, any_that_fits=False)), None)
            if entry is not None:
                self.answers.move_to_end(key)
        if entry is None:
            work, text = Meter(), key.text
            answer = make(work)
            if text is not None and isinstance(answer, Solution) and answer.lower_bound > room.cutoff_s:
                text = f"{text} {room}"  # given up
            entry = _Entry(answer, room, work, text)
            self._keep(key, entry)
        if meter is not None:
            count_once(entry.text, meter, entry.meter)
        value: Value = entry.value
        return value

    def known(
        self,
        key: Key,
        room: Room,
        meter: Meter,
        *,
        taker: Hashable = None,
        any_that_fits: bool = False,
        gap: float = 0.0,
    ) -> PlanContent | Bounded | None:
        """The answer of a room that is as large, or larger; None where none is known. A kept error is raised.

        Of two rooms, one smaller and one larger, the answer of the smaller is taken where it is as fast within a gap.

        Args:
            key: of the answer.
            room: that it has to fit into.
            meter: of who asks.
            taker: who asks.
            any_that_fits: whether any answer that fits will do of those that the taker has already.
            gap: share of the seconds of an answer that another may be slower.
        """
        with self.lock:
            every = self.answers.get(key, ())
            entries = (
                e for e in every if e.room.answers(e.value, room, any_that_fits=any_that_fits and taker in e.takers)
            )
            entry = next(entries, None) or _between(every, room, gap)
            if entry is None:
                return None
            self.answers.move_to_end(key)
            entry.takers.add(taker)
        return _taken(entry, meter)

    def planned(
        self, key: Key, room: Room, meter: Meter, make: Callable[[Meter], PlanContent | Bounded], taker: Hashable
    ) -> PlanContent | Bounded:
        """The answer of a room, made and kept, as an error is.

        Args:
            key: of the answer.
            room: that it has to fit into.
            meter: of who asks.
            make: makes it, and counts its work.
            taker: who asks.
        """
        work = Meter(search=meter)
        value: PlanContent | Bounded | InfeasiblePlanError
        try:
            value = make(work)
        except InfeasiblePlanError as error:
            value = error
        except BaseException:
            meter.merge(work)
            raise
        text = None if key.text is None else f"{key.text} {room}"
        entry = _Entry(value, room, work, text, {taker})
        self._keep(key, entry)
        return _taken(entry, meter)

    def _keep(self, key: Key, entry: _Entry) -> None:
        with self.lock:
            self.answers.setdefault(key, []).append(entry)
            self.answers.move_to_end(key)
            self.numbers += entry.numbers
            while self.numbers > _MOST_ENTRIES and len(self.answers) > 1:
                _, dropped = self.answers.popitem(last=False)
                self.numbers -= sum(e.numbers for e in dropped)

    def __reduce__(self) -> tuple[type[Store], tuple[()]]:
        return Store, ()


def count_once(name: str | None, meter: Meter, work: Meter) -> None:
    """Counts the work of an answer, unless it was counted.

    Args:
        name: of the answer, the same in every process; None where it has none.
        meter: of who asks for it.
        work: its counts. Of an answer without a name in other processes it is empty afterwards.
    """
    if name is not None:
        meter.keep(name, work)
    else:
        meter.merge(work)
        work.counts.clear()
        work.kept.clear()


def _taken(entry: _Entry, meter: Meter) -> PlanContent | Bounded:
    """An answer whose work is counted. A kept error is raised."""
    count_once(entry.text, meter, entry.meter)
    if isinstance(entry.value, InfeasiblePlanError):
        raise entry.value.with_traceback(None)
    answer: PlanContent | Bounded = entry.value
    return answer


def _between(entries: Sequence[_Entry], room: Room, gap: float) -> _Entry | None:
    """The fastest plan that fits, where those of larger rooms are faster by no more than a gap; else None."""
    plans = [e for e in entries if isinstance(e.value, PlanContent)]
    least_s = max((e.value.step_time for e in plans if e.room.is_as_large(room)), default=0.0)
    fitting = (e for e in plans if room.has(e.value) and e.value.step_time <= (1 + gap) * least_s)
    return min(fitting, key=lambda e: e.value.step_time, default=None)


def _numbers(value: object) -> int:
    """Numbers that take as many bytes as a value does: those in its arrays, and records of a plan."""
    if isinstance(value, PlanContent):
        return _NUMBERS_OF_RECORD * (len(value.operators) + len(value.choices) + len(value.copies))
    entries: int = getattr(value, "entries", 0)
    return entries
