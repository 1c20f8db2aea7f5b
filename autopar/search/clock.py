"""Seconds by phase of planning."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Adds up wall-clock seconds under names; the order is that of first use."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside the ``with`` to ``name``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def rest(self, name: str, known: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
        """``known`` phases, and the seconds of ``name`` that are in none of them; those that ran at once have no rest.

        Args:
            name: of a phase of this clock, which the others are part of.
            known: (name, seconds) of phases.
        """
        rest_s = self.seconds.get(name, 0.0) - sum(seconds for _, seconds in known)
        return (*known, (name, rest_s)) if rest_s > 0 else tuple(known)

    def phases(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds), in order."""
        return tuple(self.seconds.items())
