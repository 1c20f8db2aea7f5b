"""Which version of each layer every update's gradient reads, and when the update ends, technique by technique.

Time is in seconds of one gradient on one device. W = delay + 1 devices work: as stages of equal time, or as workers
that hold the whole model and take a drawn time (log-normal, sigma 0.5, mean 1) for each gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.schedule.without_flush.schedules import VersionMap
from autopar.transforms.asynchronous import WorkerEvent, drawn_events

#: Microbatches between two updates of pipelines that update once a batch.
MICROBATCHES = 16
_SIGMA = 0.5


@dataclass(frozen=True)
class Course:
    """What is read and when, of one run.

    Args:
        ages: ``[updates, layers]``: updates between the version that the gradient reads and the newest.
        ends_s: ``[updates]``: when each update is done.
    """

    ages: Any
    ends_s: Any


def synchronous(delay: int, updates: int, layers: int, seed: int) -> Course:
    """Every gradient is of the newest parameters: a pipeline of W stages that flushes after each batch."""
    del seed
    stages = delay + 1
    batch_s = (MICROBATCHES + stages - 1) / (MICROBATCHES * stages)
    return Course(np.zeros((updates, layers), int), batch_s * np.arange(1, updates + 1))


def delayed(delay: int, updates: int, layers: int, seed: int) -> Course:
    """Every gradient is of the parameters ``delay`` updates ago: PipeDream with vertical sync."""
    return _pipeline("pipedream-vertical", delay, updates, layers, seed)


def pipedream(delay: int, updates: int, layers: int, seed: int) -> Course:
    """Weight stashing: the last of W stages reads the newest parameters, the first those of ``delay`` updates ago."""
    return _pipeline("pipedream", delay, updates, layers, seed)


def _pipeline(name: str, delay: int, updates: int, layers: int, seed: int) -> Course:
    del seed
    stages = delay + 1
    versions = VersionMap(name, stages)
    stage_of = [n * stages // layers for n in range(layers)]
    ages = [[k - versions.reads(stage_of[n], k) for n in range(layers)] for k in range(updates)]
    return Course(np.array(ages), (np.arange(updates) + stages) / stages)


def double_buffered(delay: int, updates: int, layers: int, seed: int) -> Course:
    """PipeDream-2BW: one update old, however many stages."""
    del seed
    stages = delay + 1
    old = np.minimum(np.arange(updates), 1 if delay else 0)
    return Course(np.tile(old[:, None], (1, layers)), (np.arange(updates) + 1 + delay / MICROBATCHES) / stages)


def asynchronous(delay: int, updates: int, layers: int, seed: int) -> Course:
    """ASP: W workers that nobody holds back."""
    return _workers(delay, updates, layers, seed, None)


def bounded(delay: int, updates: int, layers: int, seed: int) -> Course:
    """SSP: W workers, none more than one update ahead of the slowest when it begins."""
    return _workers(delay, updates, layers, seed, 1)


def bulk(delay: int, updates: int, layers: int, seed: int) -> Course:
    """BSP: each of W workers computes a W-th of the batch's gradient, and the slowest ends the update."""
    workers = delay + 1
    times = np.random.default_rng(seed).lognormal(-(_SIGMA**2) / 2, _SIGMA, (updates, workers)) / workers
    return Course(np.zeros((updates, layers), int), np.cumsum(times.max(axis=1)))


def _workers(delay: int, updates: int, layers: int, seed: int, bound: int | None) -> Course:
    workers = delay + 1
    drawn = np.random.default_rng(seed).lognormal(-(_SIGMA**2) / 2, _SIGMA, (workers, updates + workers + 1))
    taken = [0] * workers

    def seconds(worker: int) -> float:
        taken[worker] += 1
        return float(drawn[worker, taken[worker] - 1])

    events = drawn_events(seconds, workers, updates + workers, bound)
    ages, ends_s = followed(events, drawn)
    return Course(np.tile(np.array(ages[:updates])[:, None], (1, layers)), np.array(ends_s[:updates]))


def followed(events: tuple[WorkerEvent, ...], seconds: Any) -> tuple[list[int], list[float]]:
    """By update its age and its end.

    Args:
        events: reads and updates in their order.
        seconds: ``[workers, updates]``, of each gradient of a worker.
    """
    now, done = 0.0, [0] * len(seconds)
    read: dict[int, tuple[int, float]] = {}
    ages: list[int] = []
    ends_s: list[float] = []
    for event in events:
        w = event.worker
        if event.kind == "read":
            read[w] = len(ages), now
            continue
        version, begun = read.pop(w)
        now = max(now, begun + float(seconds[w][done[w]]))
        done[w] += 1
        ages.append(len(ages) - version)
        ends_s.append(now)
    return ages, ends_s


TECHNIQUES = {
    "synchronous pipeline": synchronous,
    "BSP": bulk,
    "delayed": delayed,
    "pipedream": pipedream,
    "2bw": double_buffered,
    "ASP": asynchronous,
    "SSP, bound 1": bounded,
}
