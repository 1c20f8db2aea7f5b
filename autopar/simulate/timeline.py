"""`Timeline`: who did what when, and how much memory it took; simulated or measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from autopar._compat.files import write_whole
from autopar.plan.details import MemoryPoint, TimelineSlice
from autopar.plan.text import bytes_text, seconds_text
from autopar.schedule import NONE
from autopar.simulate.chrome import chrome_trace
from autopar.simulate.event import Event, Memory, shown_range
from autopar.simulate.svg import svg_picture
from autopar.simulate.terminal import text_picture


class _WorkerSummary(msgspec.Struct, frozen=True):
    worker: int
    stages: tuple[int, ...]
    busy_s: float
    idle_s: float
    peak_memory: int


class _Summary(msgspec.Struct, frozen=True):
    step_time: float
    bubble_fraction: float
    peak_memory: int
    origin: str
    workers: tuple[_WorkerSummary, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Timeline:
    """One step of all workers.

    Args:
        num_workers: workers, busy or not.
        events: everything that took time, sorted.
        memory: bytes a device over time of each worker; empty where it was not measured.
        origin: where it comes from.
        slices: operators and collectives of the only stage, by the resource that they take.
        kinds: bytes a device of it over time, by kind.
    """

    num_workers: int
    events: tuple[Event, ...]
    memory: tuple[Memory, ...] = ()
    origin: Literal["simulated", "measured"] = "simulated"
    slices: tuple[TimelineSlice, ...] = ()
    kinds: tuple[MemoryPoint, ...] = ()

    @staticmethod
    def measured(num_workers: int, events: Iterable[Event], memory: Iterable[Memory] = ()) -> Timeline:
        """The timeline of a real run.

        Args:
            num_workers: workers.
            events: in any order; times from any common zero.
            memory: of every worker, if it was measured.
        """
        return Timeline(num_workers, tuple(sorted(events)), tuple(memory), "measured")

    @cached_property
    def start_s(self) -> float:
        """Begin of the first event."""
        return shown_range(self.events)[0]

    @cached_property
    def step_time(self) -> float:
        """Seconds from the first event to the end of the last."""
        return shown_range(self.events)[1] - self.start_s

    @property
    def bubble_fraction(self) -> float:
        """Idle / (idle + busy) of the compute lanes of all workers over the step; 0 for an empty step."""
        whole = self.num_workers * self.step_time
        return (whole - sum(self.busy_s(w) for w in range(self.num_workers))) / whole if whole else 0.0

    @property
    def peak_memory(self) -> int:
        """Bytes on the fullest device at the fullest moment; 0 where memory was not measured."""
        return max((self.peak_memory_of(w) for w in range(len(self.memory))), default=0)

    def peak_memory_of(self, worker: int) -> int:
        """The most bytes a device of ``worker``."""
        return max((size for _, size in self.memory[worker]), default=0) if worker < len(self.memory) else 0

    def computing(self, worker: int) -> tuple[Event, ...]:
        """Events of the compute lane of ``worker``, in order."""
        return self._computing.get(worker, ())

    @cached_property
    def _computing(self) -> dict[int, tuple[Event, ...]]:
        by_worker: dict[int, list[Event]] = {}
        for e in self.events:
            if e.computes:
                by_worker.setdefault(e.worker, []).append(e)
        return {w: tuple(events) for w, events in by_worker.items()}

    def busy_s(self, worker: int) -> float:
        """Seconds in which ``worker`` computes."""
        return sum(e.end_s - e.start_s for e in self.computing(worker))

    def idle_s(self, worker: int) -> float:
        """Seconds in which ``worker`` waits, from the first event of the step to the last."""
        return self.step_time - self.busy_s(worker)

    def bubble_s(self, worker: int) -> float:
        """Seconds in which ``worker`` waits between its own first and last work.

        Where steps follow each other without a barrier, a worker that is through begins the next step while others
        still work; then this is its bubble.
        """
        events = [e for e in self.computing(worker) if e.end_s > e.start_s]
        if not events:
            return 0
        return max(e.end_s for e in events) - min(e.start_s for e in events) - self.busy_s(worker)

    def summary(self) -> str:
        """Step time, bubble and memory in a line."""
        memory = f", peak memory {bytes_text(self.peak_memory)} a device" if self.memory else ""
        bubble = float(self.bubble_fraction)
        return f"{self.origin}: step {seconds_text(float(self.step_time))}, bubble {bubble:.1%}{memory}"

    def to_text(self, columns: int = 100) -> str:
        """A picture in characters, a line a worker, with a summary below.

        Args:
            columns: the most characters a line for the time; times are rounded to them.
        """
        return f"{text_picture(self.num_workers, self.events, columns)}{self.summary()}\n"

    def __str__(self) -> str:
        return self.to_text()

    def to_svg(self) -> str:
        """A picture as a standalone SVG document: computing, sending and memory of every worker."""
        return svg_picture(self.num_workers, self.events, self.memory, self.summary())

    def to_chrome(self) -> str:
        """A Chrome trace (JSON), which Perfetto opens: a process a worker, its lanes, its memory as a counter."""
        return chrome_trace(self.num_workers, self.events, self.memory, self.slices, self.kinds)

    def to_json(self) -> str:
        """Summary, workers and events as one JSON document."""
        workers = tuple(
            _WorkerSummary(w, self._stages(w), self.busy_s(w), self.idle_s(w), self.peak_memory_of(w))
            for w in range(self.num_workers)
        )
        summary = _Summary(self.step_time, self.bubble_fraction, self.peak_memory, self.origin, workers, self.events)
        return msgspec.json.format(msgspec.json.encode(summary, enc_hook=float), indent=1).decode() + "\n"

    def _stages(self, worker: int) -> tuple[int, ...]:
        return tuple(sorted({e.stage for e in self.computing(worker)} - {NONE}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline to a file, whole or not at all.

        Args:
            path: a picture if it ends in ``.svg``; else a Chrome trace, which Perfetto (ui.perfetto.dev) opens.
        """
        write_whole(path, self.to_svg() if os.fspath(path).endswith(".svg") else self.to_chrome())
