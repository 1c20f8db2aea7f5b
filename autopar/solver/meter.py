"""`Meter`: counts of what planning computes, which are the same on every machine and under any load.

Builders and solvers add to the meter of their problem. What several callers share through a store is added under the
key of the store and counts once, whichever process computed it and however often. So the sum depends neither on the
number of cores nor on what was stored before. A meter counts; `autopar.search.clock` has the seconds.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field


class Work(enum.StrEnum):
    """Kinds of work, each with its unit of counting."""

    TRACED = "operators traced"
    PARTS = "nodes and edges of programs"
    CELLS = "cells of cost tables"
    REDUCED = "nodes and edges reduced"
    SWEPT = "entries of sweeps"
    WALKED = "entries of trees"
    ELIMINATED = "entries of elimination"
    PIVOTED = "columns of HiGHS times iterations"
    MODELLED = "columns of HiGHS"
    EXTRACTED = "operators of extracted shardings"
    ASSEMBLED = "operators of plans"
    SLICED = "cells of slicings"
    SCHEDULED = "tasks scheduled"


@dataclass(eq=False)
class Meter:
    """Counts by kind.

    Args:
        counts: of work that is done whenever it is asked for.
        kept: by key of a store, counts of what it keeps.
        search: the meter of the search that this one counts a part of, which gets its counts at the end of the part.
    """

    counts: dict[Work, int] = field(default_factory=dict)
    kept: dict[str, dict[Work, int]] = field(default_factory=dict)
    search: Meter | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: Work, count: int) -> None:
        """Counts more of a kind."""
        with self._lock:  # relaxations run in a thread while the next mesh is stated
            self.counts[kind] = self.counts.get(kind, 0) + int(count)

    def keep(self, key: str, other: Meter) -> None:
        """Counts what another meter has, unless something of this key was counted."""
        if key not in self.kept:
            self.kept[key] = dict(other.counts)
        for inner, counts in other.kept.items():
            self.kept.setdefault(inner, counts)

    def merge(self, other: Meter) -> None:
        """Counts what another meter has."""
        for kind, count in list(other.counts.items()):
            self.add(kind, count)
        for key, counts in list(other.kept.items()):
            self.kept.setdefault(key, counts)

    def total(self, *, of_search: bool = False) -> dict[Work, int]:
        """Counts of each kind, in the order of `Work`.

        Args:
            of_search: whether those of the search are among them that this is a part of.
        """
        meters: list[Meter] = [self]
        while of_search and meters[-1].search is not None:
            meters.append(meters[-1].search)
        kept = {key: counts for meter in meters for key, counts in meter.kept.items()}
        sums = dict.fromkeys(Work, 0)
        for counts in (*(meter.counts for meter in meters), *kept.values()):
            for kind, count in counts.items():
                sums[kind] += count
        return {kind: count for kind, count in sums.items() if count}

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Another process begins with no counts."""
        return Meter, ()
