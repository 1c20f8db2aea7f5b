"""A training on Ray whose workers are killed again and again, next to the same training left alone: equal to the bit.

Two functions share a state: one trains on batches of changing sizes, one evaluates every few steps. Now and then the
training is compiled again and a state is made; checkpoints are written while steps run, and read again. At moments that
are drawn (of steps, starting, compiling, making a state, saving, restoring and of recoveries themselves) a worker is
killed or stopped. There are 2 to 4 workers: machines come and go. Afterwards as many steps are run undisturbed.

All numbers are small integers in float32, so that sums are exact in any order: the state does not depend on how many
stages there are, and each step that is lost or run twice changes it.

Memory, descriptors, threads and files of the driver are looked at after a fifth of the time and at the end; memory of
Ray's own processes and files in its folder are reported and not judged.

With a pause between steps the training takes a small part of the machine, and workers are struck while they idle too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import autopar
from autopar.runtime.ray.machine import GROUP_MARK, exists
from benchmarks.report import Report, Row, Say

MINUTES = 15.0
#: Steps between two evaluations, two checkpoints, two restores, and two functions; batches of steps one by one.
EVALUATE, SAVE, RESTORE, COMPILE, BATCHES = 50, 20, 100, 120, (16, 8, 16, 4)
#: Bytes and counts by which the driver may grow from a fifth of the run to its end.
MOST_GROWTH_BYTES, MOST_GROWTH = 64 << 20, 8
#: What is going on when a worker is struck; with a pause, "idle" too.
MOMENTS = ("step", "start", "compile", "init", "save", "restore", "recovery")
#: Most seconds from the begin of a moment to the strike: of those that take long, of a step, of others.
_DELAYS_S = {"start": 0.3, "compile": 0.3, "recovery": 0.3, "idle": 0.3, "step": 0.03}
_DELAY_S = 0.004
#: Steps between two strikes at least.
BETWEEN = 10
#: What brings moments about that do not come by themselves.
_AFTER = {"recovery": signal.SIGKILL, "start": signal.SIGTERM}
#: Least and most workers; layers and their width; weights are -2 to 1.
FEWEST, MOST, LAYERS, WIDTH, WEIGHTS = 2, 4, 4, 8, 4
#: Steps within which each moment comes, by which the one that was drawn is waited for, and most seconds for that.
_PATIENCE, _PATIENCE_S = COMPILE + SAVE, 300.0


class Moments(logging.Handler):
    """What is going on: the training says what it does, records of the driver what that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = ""
        self.steps = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Takes note of a record."""
        event = getattr(record, "event", "")
        if event == "recovery" or (event == "start" and self.now != "recovery"):
            self.now = event

    @contextlib.contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """What is done inside is that moment, but for what a recovery takes."""
        before, self.now = self.now, moment
        try:
            yield
        finally:
            self.now = before


@dataclass
class Strikes:
    """Kills of workers at moments that are drawn.

    Args:
        every_s: mean seconds between two.
        wanted: moments, each of which is to be struck as often as the others.
        seed: of the moments and victims.
    """

    every_s: float
    wanted: tuple[str, ...] = MOMENTS
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seen: set[psutil.Process] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)

    def strike(self, cluster: Any, moments: Moments, room: list[int], over: threading.Event) -> None:
        """Kills and stops workers of a cluster, and changes how many there is room for, until it is over."""
        draw, steps, due = random.Random(self.seed), 0, time.monotonic()
        while True:
            due = max(due + draw.uniform(0.2, 1.8) * self.every_s, time.monotonic() + 0.2 * self.every_s)
            if over.wait(due - time.monotonic()):
                return
            # However slow the machine is, there are steps between two: else nothing but starting would be struck.
            while moments.steps < steps + BETWEEN and not over.wait(0.01):
                pass
            steps = moments.steps
            wanted = min(self.wanted, key=lambda m: (self.counts[m], draw.random()))
            if wanted in _AFTER:  # workers start again, and are struck on the way
                self._strike(cluster, moments, draw, _AFTER[wanted])
            if draw.random() < 0.5:
                room[0] = draw.randint(FEWEST, MOST)
                self.workers.add(room[0])
            kind = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
            until, last = time.monotonic() + min(_PATIENCE_S, 2.5 * self.every_s), moments.steps + _PATIENCE
            while not over.wait(0.0005) and time.monotonic() < until and moments.steps < last:
                if moments.now == wanted:
                    over.wait(draw.uniform(0, _DELAYS_S.get(wanted, _DELAY_S)))
                    if self._strike(cluster, moments, draw, kind):
                        break

    def _strike(self, cluster: Any, moments: Moments, draw: random.Random, kind: signal.Signals) -> bool:
        moment = moments.now
        processes = list(cluster.processes)
        if moment in _AFTER:
            processes = [p for p in _workers() if p not in processes] or processes
        self.note(processes)
        if processes and moment:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(processes), kind)
                self.counts[moment] += 1
                return True
        return False

    def note(self, processes: Sequence[int]) -> None:
        """Takes note of workers by id and start: hours later another process may have the id."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen.add(psutil.Process(process))

    def left(self) -> int:
        """Number of those workers that have not ended."""
        return sum(p.is_running() and exists(p.pid) for p in self.seen)


def _workers() -> list[int]:
    """Workers of this process that have started, also those that have not said a word yet."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if GROUP_MARK in child.environ():
                found.append(child.pid)
    return found


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        steps: that were run.
        digest: hash of the last state, of all that was evaluated, and of each state that was made.
        recoveries: how often workers were replaced.
        early: what the driver used after a fifth of the time.
        late: likewise at the end.
    """

    steps: int
    digest: str
    recoveries: int
    early: Row
    late: Row


def run(quick: bool, say: Say, minutes: float = MINUTES, pause_s: float = 0.0) -> Report:
    """The benchmark.

    Args:
        quick: half a minute.
        say: takes a line about what is going on.
        minutes: of the training with kills.
        pause_s: seconds between two of its steps.
    """
    seconds = 30.0 if quick else minutes * 60
    wanted = (*MOMENTS, "idle") if pause_s else MOMENTS
    strikes = Strikes(8.0 if quick else min(120.0, max(12.0, seconds / 40)), wanted)
    say(f"soak: {seconds:.0f} s with a kill every {strikes.every_s:.0f} s")
    disturbed = _train(seconds, None, strikes, say, pause_s)
    left = strikes.left()
    say(f"soak: {disturbed.steps} steps without kills")
    alone = _train(None, disturbed.steps, None, say)
    growth = {k: disturbed.late[k] - disturbed.early[k] for k in disturbed.early}
    flat = growth["rss_bytes"] <= MOST_GROWTH_BYTES and all(
        growth[k] <= MOST_GROWTH for k in ("descriptors", "threads", "files")
    )
    row: Row = {
        "steps": disturbed.steps,
        "kills": strikes.counts.total(),
        **{f"kills, {m}": strikes.counts[m] for m in wanted},
        "workers": " ".join(map(str, sorted(strikes.workers))),
        "recoveries": disturbed.recoveries,
        "equal": disturbed.digest == alone.digest,
        "processes left": left,
        **{f"{k} growth" if k != "rss_bytes" else "growth_bytes": v for k, v in growth.items()},
    }
    struck = all(strikes.counts[m] for m in wanted)
    return Report(
        "soak",
        "the same state to the bit as without kills, each moment struck, nothing grows, no process is left",
        (row,),
        bool(row["equal"]) and not left and (seconds < 600 or (flat and struck)),
    )


def _train(seconds: float | None, steps: int | None, strikes: Strikes | None, say: Say, pause_s: float = 0) -> Outcome:
    """Trains for some seconds, or some steps, with a pause behind each."""
    over, moments, room = threading.Event(), Moments(), [MOST]
    logger = logging.getLogger("autopar.ray")
    logger.addHandler(moments)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, _cluster(room) as cluster:
        thread = None
        if strikes is not None:
            thread = threading.Thread(target=strikes.strike, args=(cluster, moments, room, over), daemon=True)
            thread.start()
            # Also where no step ends any more: it would never do so under more kills.
            threading.Timer(seconds or 0, over.set).start()
        ray_folder = Path(cluster.run.cache).parent
        training = _Training(cluster, autopar.Checkpoints(folder, keep=2), moments)
        began, early = time.monotonic(), _used(folder, ray_folder)
        told_s = 60.0
        try:
            while training.number < steps if steps is not None else time.monotonic() - began < (seconds or 0):
                training.advance()
                if pause_s:
                    with moments.during("idle"):
                        time.sleep(pause_s)
                passed_s = time.monotonic() - began
                if seconds is not None and passed_s < 0.2 * seconds:
                    early = _used(folder, ray_folder)
                if passed_s > told_s:
                    struck = dict(strikes.counts) if strikes is not None else {}
                    used = " ".join(f"{k}={v}" for k, v in _used(folder, ray_folder).items())
                    say(f"soak: {training.number} steps in {passed_s:.0f} s {struck} {used}")
                    told_s += 60
        finally:
            over.set()
            if thread is not None:
                thread.join()
        digest = training.finished()
        late = _used(folder, ray_folder)
        if strikes is not None:
            strikes.note(cluster.processes)
        recoveries = cluster.workers.recoveries
    logger.removeHandler(moments)
    return Outcome(training.number, digest, recoveries, early, late)


class _Training:
    """The training, step by step."""

    def __init__(self, cluster: Any, checkpoints: autopar.Checkpoints, moments: Moments) -> None:
        self.number = 0
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._moments = moments
        self._digest = hashlib.sha256()
        self._evaluate = autopar.parallelize(_evaluate, cluster=cluster, num_microbatches=1)
        self._begin()
        self._state = self._made()

    def _begin(self) -> None:
        with self._moments.during("compile"):
            # A function of its own: the one before is dropped, and its programs with it.
            self._step = autopar.parallelize(
                lambda w, batch: _step(w, batch), cluster=self._cluster, num_microbatches=2
            )
            self._step.compile(_weights(0), _batch(0))

    def _made(self) -> Any:
        with self._moments.during("init"):
            return self._step.init(_weights, jnp.int32(self.number))

    def advance(self) -> None:
        """The next step, and what is due with it."""
        number, moments = self.number, self._moments
        if number % COMPILE == COMPILE - 1:
            self._begin()
            self._note(self._made())
        with moments.during("step"):
            batch = _batch(number)
            self._state, _ = self._step(self._state, batch)
            if number % EVALUATE == EVALUATE - 1:
                self._note(self._evaluate(self._state, batch))
        if number % SAVE == SAVE - 1:
            with moments.during("save"):
                self._checkpoints.save(number, self._state, wait=number % (2 * SAVE) == SAVE - 1)
        if number % RESTORE == RESTORE - 1:
            with moments.during("restore"):
                self._state = self._checkpoints.restore(self._state)
        self.number += 1
        moments.steps += 1

    def finished(self) -> str:
        """Hash of everything."""
        self._checkpoints.wait()
        self._note(self._state)
        return self._digest.hexdigest()

    def _note(self, tree: Any) -> None:
        for leaf in jax.tree.leaves(tree):
            self._digest.update(np.asarray(leaf).tobytes())


def _cluster(room: list[int]) -> Any:
    cluster: Any = autopar.Cluster.ray(
        workers=MOST, devices_per_worker=1, recover=True, copy_every=5, deadline_s=10, start_s=150, load_s=150,
        attempts=200, repeats=200,
    )  # fmt: skip
    # Ray on one machine does not lose any: how many workers there is room for is said here.
    cluster.workers.room = lambda: (room[0],)
    return cluster


def _weights(seed: Any) -> dict[str, Any]:
    key = jax.random.key(seed)
    draw = jax.random.randint(key, (LAYERS, WIDTH, WIDTH), 0, WEIGHTS) - WEIGHTS // 2
    return {f"w{n}": draw[n].astype(jnp.float32) for n in range(LAYERS)}


def _loss(w: Any, batch: Any) -> Any:
    x = batch["x"]
    for n in range(LAYERS):
        x = jnp.mod(x @ w[f"w{n}"], 4.0)
    return jnp.sum(x * batch["y"])


def _step(w: Any, batch: Any) -> Any:
    """Weights stay integers of a small range, and move by their gradient."""
    loss, grads = jax.value_and_grad(_loss)(w, batch)
    half = WEIGHTS / 2
    return jax.tree.map(lambda p, g: jnp.mod(p - g + half, float(WEIGHTS)) - half, w, grads), loss


def _evaluate(w: Any, batch: Any) -> Any:
    return sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(w)) + jnp.sum(batch["x"])


def _batch(number: int) -> Any:
    """The batch of a step."""
    draw = np.random.default_rng(number)
    shape = (BATCHES[number % len(BATCHES)], WIDTH)
    return {"x": draw.integers(0, 4, shape).astype("float32"), "y": draw.integers(-1, 2, shape).astype("float32")}


def _used(folder: str, ray_folder: Path) -> Row:
    """What this process uses.

    Args:
        folder: of checkpoints.
        ray_folder: of Ray and its workers.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
        "ray_rss_bytes": _rss_of_ray(),
        "ray_files": sum(len(files) for _, _, files in os.walk(ray_folder)),
    }


def _rss_of_ray() -> int:
    """Bytes of Ray's processes that live as long as the cluster: all but those of workers."""
    count = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if GROUP_MARK not in child.environ() and not child.name().startswith("ray::"):
                count += child.memory_info().rss
    return count
