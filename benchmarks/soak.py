"""A training on Ray whose workers are killed again and again, beside the same training left alone: equal to the bit.

Two functions share a state: one trains on batches of changing sizes, one evaluates every few steps. Checkpoints are
written while steps run, and read again. At random moments (of steps, copies, checkpoints, starting, loading and of
recoveries themselves) a worker is killed or stopped. Afterwards as many steps are run on workers that nobody disturbs.

Memory, descriptors, threads and files of the driver are looked at after a fifth of the steps and at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.runtime.ray.machine import exists
from benchmarks.report import Report, Row, Say
from examples import mlp

MINUTES = 15.0
#: Steps between two evaluations, and between two checkpoints; batches of steps that follow each other.
EVALUATE, SAVE, BATCHES = 50, 20, (16, 8, 16, 4)
#: Bytes and counts by which the driver may grow from a fifth of the run to its end.
MOST_GROWTH_BYTES, MOST_GROWTH = 64 << 20, 8
_SIZES = {"layers": 4, "hidden": 16}


@dataclass
class Strikes:
    """Kills of workers at random moments.

    Args:
        every_s: mean seconds between two.
        seed: of the moments and victims.
    """

    every_s: float
    seed: int = 0
    count: int = 0
    seen: set[int] = field(default_factory=set)

    def strike(self, cluster: Any, over: threading.Event) -> None:
        """Kills and stops workers of a cluster until it is over."""
        draw = random.Random(self.seed)
        while not over.wait(draw.uniform(0.2, 1.8) * self.every_s):
            processes = cluster.processes
            self.seen.update(processes)
            if processes:
                kind = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(processes), kind)
                    self.count += 1


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        steps: that were run.
        digest: hash of the last state and of all that was evaluated.
        recoveries: how often workers were replaced.
        early: what the driver used after a fifth of the steps.
        late: likewise at the end.
    """

    steps: int
    digest: str
    recoveries: int
    early: Row
    late: Row


def run(quick: bool, say: Say, minutes: float = MINUTES) -> Report:
    """The benchmark; ``quick`` takes half a minute."""
    seconds = 30.0 if quick else minutes * 60
    strikes = Strikes(10.0 if quick else min(120.0, max(15.0, seconds / 20)))
    say(f"soak: {seconds:.0f} s with a kill every {strikes.every_s:.0f} s")
    disturbed = _train(seconds, None, strikes, say)
    left = [p for p in strikes.seen if exists(p)]
    say(f"soak: {disturbed.steps} steps without kills")
    alone = _train(None, disturbed.steps, None, say)
    growth = {k: disturbed.late[k] - disturbed.early[k] for k in disturbed.early}
    flat = growth["rss_bytes"] <= MOST_GROWTH_BYTES and all(
        growth[k] <= MOST_GROWTH for k in ("descriptors", "threads", "files")
    )
    row: Row = {
        "steps": disturbed.steps,
        "kills": strikes.count,
        "recoveries": disturbed.recoveries,
        "equal": disturbed.digest == alone.digest,
        "processes left": len(left),
        **{f"{k} growth" if k != "rss_bytes" else "growth_bytes": v for k, v in growth.items()},
    }
    return Report(
        "soak",
        "the same state to the bit as without kills, nothing grows, no process is left",
        (row,),
        bool(row["equal"]) and not left and (quick or flat),
    )


def _train(seconds: float | None, steps: int | None, strikes: Strikes | None, say: Say) -> Outcome:
    """Trains for some seconds, or some steps."""
    step, (state, _) = mlp.build("tiny", batch=BATCHES[0], **_SIZES)
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder, _cluster() as cluster:
        train = autopar.parallelize(step, cluster=cluster, num_microbatches=2)
        evaluate = autopar.parallelize(_evaluate, cluster=cluster, num_microbatches=1)
        checkpoints = autopar.Checkpoints(folder, keep=2)
        thread = threading.Thread(target=strikes.strike, args=(cluster, over), daemon=True) if strikes else None
        if thread is not None:
            thread.start()
        until = None if seconds is None else time.monotonic() + seconds
        digest, number, early = hashlib.sha256(), 0, _used(folder)
        try:
            while number < steps if steps is not None else time.monotonic() < (until or 0):
                batch = _batch(number)
                state, _ = train(state, batch)
                if number % EVALUATE == EVALUATE - 1:
                    digest.update(np.asarray(evaluate(state, batch)).tobytes())
                if number % SAVE == SAVE - 1:
                    checkpoints.save(number, state, wait=False)
                if number % (5 * SAVE) == 5 * SAVE - 1:
                    state = checkpoints.restore(state)
                number += 1
                if until is not None and seconds is not None and until - time.monotonic() > 0.8 * seconds:
                    early = _used(folder)
        finally:
            over.set()
            if thread is not None:
                thread.join()
        checkpoints.wait()
        for leaf in jax.tree.leaves(state):
            digest.update(np.asarray(leaf).tobytes())
        recoveries = cluster.workers.recoveries
        late = _used(folder)
        if strikes is not None:
            strikes.seen.update(cluster.processes)
    return Outcome(number, digest.hexdigest(), recoveries, early, late)


def _cluster() -> Any:
    return autopar.Cluster.ray(
        workers=2, devices_per_worker=2, recover=True, copy_every=5, deadline_s=10, start_s=60, load_s=60,
        attempts=200, repeats=200,
    )  # fmt: skip


def _evaluate(state: Any, batch: Any) -> Any:
    total = sum(jnp.sum(jnp.square(x.astype("float32"))) for x in jax.tree.leaves(state))
    return total + sum(jnp.mean(jnp.square(x.astype("float32"))) for x in jax.tree.leaves(batch))


def _batch(number: int) -> Any:
    """The batch of a step."""
    draw = np.random.default_rng(number)
    _, (_, like) = mlp.build("tiny", abstract=True, batch=BATCHES[number % len(BATCHES)], **_SIZES)
    return jax.tree.map(lambda x: draw.normal(size=x.shape).astype(x.dtype), like)


def _used(folder: str) -> Row:
    """What this process uses."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
    }
