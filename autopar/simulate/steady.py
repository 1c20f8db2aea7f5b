"""A call of a pipeline without a flush once it is full: one period of a run that has no end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.schedule import Dataflow, Table, Work, build, get
from autopar.schedule.versions import VersionMap
from autopar.simulate.durations import Durations
from autopar.simulate.engine import run
from autopar.simulate.event import Event
from autopar.simulate.timeline import Timeline

#: Part of a period below which a piece of an event is rounding.
_ROUNDING = 1e-9


def steady(table: Table, dataflow: Dataflow, durations: Durations) -> Timeline:
    """A call in the steady state; intervals that cross its end are shown at its beginning.

    A stage's update, with what it computes before passes, comes behind each backward pass, or of "2bw" behind that of
    the last microbatch, here as an equal share behind each.

    Args:
        table: of a schedule without a flush.
        dataflow: its works.
        durations: seconds of works and transfers.
    """
    stages, m = table.num_stages, table.num_microbatches
    fill = 2 * stages
    program = build(get(table.name).table(stages, fill + m + 2 * stages), dataflow)
    versions = VersionMap(table.name, stages, m)
    whole = run(program, _paced(dataflow, durations, versions.update_every))
    begins = {e.microbatch: e.start_s for e in whole.computing(0) if e.kind == "forward"}
    start_s, period_s = begins[fill], begins[fill + m] - begins[fill]
    inside = (e for e in whole.events if fill <= e.microbatch < fill + m)
    events = [piece for e in inside for piece in _in_period(e, start_s, period_s, fill)]
    return Timeline(table.num_workers, tuple(sorted(events)))


def _paced(dataflow: Dataflow, durations: Durations, every: int) -> Durations:
    """Updates as a part of backward passes."""
    work_s = dict(durations.work_s)
    for spec in dataflow.works:
        if spec.work.kind in ("update", "before"):
            backward = Work("backward", spec.work.stage)
            work_s[backward] = work_s.get(backward, 0.0) + durations.of_work(spec.work) / every
            work_s[spec.work] = 0.0
    return replace(durations, work_s=work_s)


def _in_period(event: Event, start_s: float, period_s: float, first: int) -> Iterator[Event]:
    """An event in the period, in two pieces where it crosses the end."""
    begin = (event.start_s - start_s) % period_s
    end = begin + event.end_s - event.start_s
    for a, b in ((begin, min(end, period_s)), (0.0, end - period_s)):
        if b - a > _ROUNDING * period_s:
            yield replace(event, start_s=a, end_s=b, microbatch=event.microbatch - first)
