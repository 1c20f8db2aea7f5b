"""Timelines as Chrome traces, the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.plan.details import MemoryPoint, TimelineSlice
from autopar.schedule import NONE
from autopar.simulate.event import Event, Memory

_COMPUTE, _SEND = 0, 1


def chrome_trace(
    num_workers: int,
    events: Sequence[Event],
    memory: Sequence[Memory],
    slices: Sequence[TimelineSlice] = (),
    kinds: Sequence[MemoryPoint] = (),
) -> str:
    """A trace with a process a worker and a thread a lane; times in microseconds, as the format wants.

    Args:
        num_workers: workers, busy or not.
        events: what took time.
        memory: bytes over time of each worker, or nothing.
        slices: operators and collectives of one stage: a thread for each resource of a process of their own.
        kinds: bytes by kind over time: a counter of that process.
    """
    trace_events: list[dict[str, Any]] = []
    for worker in range(num_workers):
        trace_events.append(_meta("process_name", worker, _COMPUTE, f"worker {worker}"))
        trace_events.append(_meta("thread_name", worker, _COMPUTE, "compute"))
        trace_events.append(_meta("thread_name", worker, _SEND, "send"))
    trace_events += [_slice(e) for e in events]
    for worker, points in enumerate(memory):
        for time_s, size in points:
            trace_events.append(
                {"ph": "C", "pid": worker, "tid": 0, "name": "memory", "ts": _us(time_s), "args": {"bytes": size}}
            )
    return _document([*trace_events, *_of_stage(num_workers, "operators and collectives", slices, kinds)])


def stage_trace(timelines: Mapping[str, tuple[Sequence[TimelineSlice], Sequence[MemoryPoint]]]) -> str:
    """A trace with a process a timeline of one stage: its slices and its memory by kind.

    Args:
        timelines: by name.
    """
    parts = [_of_stage(n, name, *timeline) for n, (name, timeline) in enumerate(timelines.items())]
    return _document([event for part in parts for event in part])


def _document(events: list[dict[str, Any]]) -> str:
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False) + "\n"


def _of_stage(
    process: int, title: str, slices: Sequence[TimelineSlice], kinds: Sequence[MemoryPoint]
) -> list[dict[str, Any]]:
    """Events of the operators and collectives of one stage."""
    if not slices:
        return []
    resources = ["compute", *sorted({s.resource for s in slices} - {"compute"})]
    trace_events = [_meta("process_name", process, 0, title)]
    trace_events += [_meta("thread_name", process, n, r if n == 0 else f"{r} links") for n, r in enumerate(resources)]
    for s in slices:
        start = _us(s.start_s)
        trace_events.append(
            {"ph": "X", "pid": process, "tid": resources.index(s.resource), "name": s.name, "cat": s.resource,
             "ts": start, "dur": round(_us(s.end_s) - start, 6), "args": {}}
        )  # fmt: skip
    for point in kinds:
        trace_events.append(
            {
                "ph": "C",
                "pid": process,
                "tid": 0,
                "name": "memory by kind",
                "ts": _us(point.time_s),
                "args": point.bytes,
            }
        )
    return trace_events


def _meta(kind: str, worker: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": worker, "tid": lane, "name": kind, "args": {"name": name}}


def _slice(e: Event) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": e.stage, "microbatch": e.microbatch, "to worker": e.target}
    args = {name: number for name, number in args.items() if number != NONE}
    if not e.computes:
        args["bytes"] = e.bytes
    start = _us(e.start_s)
    # The end is rounded, not the length: neighbours that touch must not overlap.
    return {
        "ph": "X", "pid": e.worker, "tid": _COMPUTE if e.computes else _SEND, "name": e.name, "cat": e.kind,
        "ts": start, "dur": round(_us(e.end_s) - start, 6), "args": args,
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 6)
