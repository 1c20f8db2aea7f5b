"""Simulated runs of schedules with equal stages."""

from __future__ import annotations

from autopar.schedule import build, chain, get
from autopar.simulate import Timeline, equal_stages, run


def simulated(
    name, workers, microbatches, forward=1, backward=2, weight=1, transfer=0, depth=None, **options
) -> Timeline:
    """A step of schedule ``name`` on ``workers`` workers that all take the same times."""
    schedule = get(name, **options)
    table = schedule.table(workers * schedule.chunks, microbatches)
    dataflow = chain(table)
    seconds = {"forward": forward, "backward": backward, "weight": weight}
    return run(build(table, dataflow), equal_stages(table, dataflow, seconds, transfer), depth)
