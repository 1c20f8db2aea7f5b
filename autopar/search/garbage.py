"""Rarer runs of Python's collector of cyclic garbage while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Containers made and not yet freed between two runs of the collector, runs over new ones for one over older ones, and
#: so on. With Python's own 700 a sixth of the time that planning takes goes into runs that find nothing: graphs and
#: tables are many, live long and have no cycles.
THRESHOLDS = (50_000, 10, 10)


@contextmanager
def rare_collections() -> Iterator[None]:
    """The collector runs rarely inside the ``with``; its thresholds, which hold for the process, are put back after.

    One that is off, or runs as rarely already, is left as it is.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < THRESHOLDS[0]:
        yield
        return
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
