"""Timelines as Chrome traces, the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from autopar.schedule import NONE
from autopar.simulate.event import Event, Memory

_COMPUTE, _SEND = 0, 1


def chrome_trace(num_workers: int, events: Sequence[Event], memory: Sequence[Memory]) -> str:
    """A trace with a process a worker and a thread a lane; times in microseconds, as the format wants.

    Args:
        num_workers: workers, busy or not.
        events: what took time.
        memory: bytes over time of each worker, or nothing.
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
    return (
        json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events}, separators=(",", ":"), allow_nan=False)
        + "\n"
    )


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
