"""What workers measured, as a `Timeline`."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError
from autopar.runtime.ray.messages import Timed
from autopar.runtime.ray.source import Pipelined
from autopar.schedule import Apply, Run, Send
from autopar.simulate import Event, Timeline


def measured_timeline(source: Pipelined, times: Sequence[Sequence[Timed]]) -> Timeline:
    """The timeline of a step: programs on the compute lanes, sends next to them.

    Args:
        source: the pipeline.
        times: for each worker when its instructions ran, by clocks that agree (those of one machine do).

    Raises:
        AutoparError: nothing was measured.
    """
    if not any(times):
        raise AutoparError("no step was timed", remedy="run one with timed=True")
    zero = min(t.start_s for line in times for t in line)
    bytes_of = {v.name: v.bytes for v in source.program.dataflow.values}
    events = []
    for worker, line in enumerate(times):
        for t in line:
            instruction = source.instruction(worker, t.index)
            start, end = t.start_s - zero, t.end_s - zero
            if isinstance(instruction, Run):
                work = instruction.work
                events.append(Event(start, end, worker, work.kind, work.stage, instruction.microbatch, str(work)))
            elif isinstance(instruction, Apply):
                work = instruction.work
                events.append(Event(start, end, worker, work.kind, work.stage, name=str(work)))
            elif isinstance(instruction, Send):
                value, to = instruction.value, instruction.to
                size = bytes_of.get(value.value, 0)
                events.append(Event(start, end, worker, "send", name=str(value), target=to, bytes=size))
    return Timeline.measured(len(times), events)
