"""Seconds by phase of planning."""

from __future__ import annotations

import time
from collections.abc import Iterator
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

    def phases(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds), in order."""
        return tuple(self.seconds.items())
