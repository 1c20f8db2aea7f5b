"""All schedules on equal stages: bubble, memory, transfers, and how long it takes to build, verify and simulate them.

A worker has the same work in every schedule: with two stages a worker each takes half as long, and a backward that is
not split takes as long as its two halves together.
"""

from __future__ import annotations

import time
from fractions import Fraction

from autopar.errors import ScheduleError
from autopar.schedule import Send, build, chain, get, schedules, verify
from autopar.simulate import equal_stages, run
from benchmarks.report import Report, Row, Say

TARGET_S = 200e-6
WORKERS, MICROBATCHES = 8, 32


def measure(name: str, workers: int, microbatches: int) -> Row | None:
    """The row of a schedule; None where it does not exist for these numbers."""
    schedule = get(name)
    try:
        table = schedule.table(workers * schedule.chunks, microbatches)
    except ScheduleError:
        return None
    part = Fraction(1, schedule.chunks)
    seconds = {"forward": part, "backward": part if table.splits_backward else 2 * part, "weight": part}
    dataflow = chain(table, activation_bytes=1)
    began_s = time.perf_counter()
    program = build(table, dataflow)
    built_s = time.perf_counter()
    peaks = verify(program).peak_bytes
    verified_s = time.perf_counter()
    timeline = run(program, equal_stages(table, dataflow, seconds))
    ended_s = time.perf_counter()
    lines = [i for w in program.workers for i in w.instructions]
    return {
        "schedule": name,
        "step, forwards": float(timeline.step_time),
        "bubble": float(timeline.bubble_fraction),
        "waits inside, forwards": float(max(timeline.bubble_s(w) for w in range(workers))),
        "activations of a whole stage": max(peaks) / schedule.chunks,
        "transfers": sum(isinstance(i, Send) for i in lines),
        "instructions": len(lines),
        "built in wall_s": built_s - began_s,
        "verified in wall_s": verified_s - built_s,
        "simulated in wall_s": ended_s - verified_s,
        "an instruction, wall_s": (ended_s - began_s) / len(lines),
    }


def run_all(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes few workers and microbatches."""
    workers, microbatches = (2, 4) if quick else (WORKERS, MICROBATCHES)
    rows = []
    for name in schedules():
        if name != "table":
            say(f"schedules: {name}")
            row = measure(name, workers, microbatches)
            rows += [] if row is None else [row]
    return Report(
        "schedules",
        f"building, verifying and simulating an instruction takes less than {TARGET_S * 1e6:.0f} us",
        tuple(rows),
        all(row["an instruction, wall_s"] < TARGET_S for row in rows),
        (
            f"{workers} workers, {microbatches} microbatches, backward twice the forward, transfers free. "
            "inference has no backward",
            '"waits inside": the most that a worker waits between its first and its last pass',
        ),
        measured=("built in wall_s", "verified in wall_s", "simulated in wall_s", "an instruction, wall_s"),
    )
