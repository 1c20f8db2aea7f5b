"""Seconds by phase of planning, and work units: what planning takes, counted, so that it is the same on every machine.

A unit is about 10 ns of a core. `python -m benchmarks work` fits the weights to CPU seconds and prints their error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.solver.meter import Meter, Work


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


#: Seconds of a core that a unit stands for.
UNIT_S = 1e-8

#: Units of one of each kind.
WEIGHTS: Mapping[Work, float] = MappingProxyType(
    {
        Work.TRACED: 20_000,
        Work.PARTS: 10_000,
        Work.CELLS: 4,
        Work.REDUCED: 2_500,
        Work.SWEPT: 0.06,
        Work.WALKED: 0.2,
        Work.ELIMINATED: 0.3,
        Work.PIVOTED: 0.3,
        Work.MODELLED: 1_800,
        Work.EXTRACTED: 8_500,
        Work.ASSEMBLED: 4_300,
        Work.SLICED: 30,
        Work.SCHEDULED: 60_000,
    }
)


def units_of(meter: Meter) -> int:
    """Work units of all that a meter counted, with the search that it counts a part of."""
    return sum(round(WEIGHTS[kind] * count) for kind, count in meter.total(of_search=True).items())


def units(meter: Meter) -> tuple[tuple[str, int], ...]:
    """(kind, work units) of what a meter counted, in the order of kinds."""
    return tuple((kind.value, round(WEIGHTS[kind] * count)) for kind, count in meter.total().items())
