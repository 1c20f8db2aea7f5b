"""Loss against updates and against simulated seconds, for each technique at delays of 0 to 8 updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.report import Report, Row, Say
from benchmarks.stale.delays import TECHNIQUES
from benchmarks.stale.learning import REPLICAS, agreed, begun, learner
from benchmarks.stale.tasks import Task, tasks

DELAYS = tuple(range(9))
SEEDS = tuple(range(5))
_PERIODIC = ("local SGD", "DiLoCo")
_SIGMA = 0.5


@dataclass(frozen=True)
class Curve:
    """A technique at one delay, the mean of all seeds.

    Args:
        losses: on what is held out.
        ends_s: simulated seconds of the same moments.
        spread: of the last loss over the seeds: standard deviation.
    """

    losses: Any
    ends_s: Any
    spread: float

    def reached_s(self, loss: float) -> float | None:
        """Seconds until the loss is no more than ``loss``; None where it never is."""
        below = np.flatnonzero(self.losses <= loss)
        return float(self.ends_s[below[0]]) if len(below) else None


def run(quick: bool, say: Say, seed: int = 0) -> Report:
    """Runs all tasks.

    Args:
        quick: one task, three delays and one seed.
        say: takes a line for each task.
        seed: the first of the seeds.
    """
    delays, periodic = ((0, 7, 8), (3,)) if quick else (DELAYS, DELAYS)
    seeds = tuple(seed + s for s in (SEEDS[:1] if quick else SEEDS))
    updates, every = (96, 16) if quick else (480, 16)
    rows: list[Row] = []
    details = []
    notes = []
    passed = True
    for task in tasks(quick):
        say(f"stale: {task.name}")
        curves = curves_of(task, delays, periodic, seeds, updates, every)
        wanted = 1.1 * float(curves["synchronous pipeline", 0].losses[-1])
        for name in dict.fromkeys(n for n, _ in curves):
            final = {f"delay {d}": _shown(curves[name, d].losses[-1]) for d in _known(curves, name)}
            rows.append({"task": task.name, "technique": name, **final})
        reached = [
            {
                "technique": name,
                **{f"delay {d}": curves[name, d].reached_s(wanted) for d in _known(curves, name)},
                "spread of the last loss": max(curves[name, d].spread for d in _known(curves, name)),
            }
            for name in dict.fromkeys(n for n, _ in curves)
        ]
        details.append((f"{task.name}: simulated seconds until a loss of {wanted:.4g}", tuple(reached)))
        notes.append(_compared(task, curves, delays, wanted))
        if task.name == "quadratic":
            passed = _is_stable(curves, delays)
    target = "on the quadratic a constant delay of 7 converges and one of 8 does not: 2 sin(pi / (4 d + 2))"
    return Report("stale", target, tuple(rows), passed, tuple(notes), tuple(details))


def curves_of(
    task: Task, delays: Sequence[int], periodic: Sequence[int], seeds: Sequence[int], updates: int, every: int
) -> dict[tuple[str, int], Curve]:
    """By technique and delay what it learns; replicas that agree every ``period + 1`` steps have its place.

    Args:
        task: what is learned.
        delays: of the gradients.
        periodic: one less than the periods of local SGD and DiLoCo.
        seeds: of the runs.
        updates: batches in all.
        every: batches between two measurements.
    """
    found: dict[tuple[str, int], Curve] = {}
    layers = len(jax.eval_shape(task.init, jax.random.key(0)))
    courses = {n: [[make(d, updates, layers, s) for s in seeds] for d in delays] for n, make in TECHNIQUES.items()}
    ages = {n: np.array([[c.ages for c in row] for row in rows]) for n, rows in courses.items()}
    start = begun(task, seeds, updates)
    learn = learner(task, 1 + max(int(a.max()) for a in ages.values()), updates, every)
    for name, rows in courses.items():
        losses = learn(ages[name], start)
        for d, row, course in zip(delays, losses, rows, strict=True):
            ends_s = np.mean([c.ends_s for c in course], axis=0)[every - 1 :: every]
            found[name, d] = _curve(row, ends_s)
    for name in _PERIODIC:
        for d in periodic:
            losses = agreed(task, name, d + 1, start, every)
            step = every // REPLICAS
            found[name, d] = _curve(losses, _periodic_s(d + 1, updates, seeds)[step - 1 :: step])
    return found


def _known(curves: dict[tuple[str, int], Curve], name: str) -> list[int]:
    return [d for n, d in curves if n == name]


def _curve(losses: Any, ends_s: Any) -> Curve:
    return Curve(losses.mean(axis=0), ends_s, float(losses[:, -1].std()))


def _periodic_s(period: int, updates: int, seeds: Sequence[int]) -> Any:
    """Seconds at which each inner step ends where replicas wait for the slowest every ``period`` steps."""
    found = []
    for seed in seeds:
        drawn = np.random.default_rng(seed).lognormal(-(_SIGMA**2) / 2, _SIGMA, (updates // REPLICAS, REPLICAS))
        ends_s, begun = [], 0.0
        for first in range(0, len(drawn), period):
            inner = np.cumsum(drawn[first : first + period], axis=0).max(axis=1)
            ends_s += list(begun + inner)
            begun += inner[-1]
        found.append(ends_s)
    return np.mean(found, axis=0)


def _is_stable(curves: dict[tuple[str, int], Curve], delays: Sequence[int]) -> bool:
    first = float(curves["synchronous pipeline", 0].losses[0])
    return all((float(curves["delayed", d].losses[-1]) < first) == (d < 8) for d in delays)


def _compared(task: Task, curves: dict[tuple[str, int], Curve], delays: Sequence[int], wanted: float) -> str:
    """What PipeDream's paper says of asynchronous data parallelism (figure 5), here."""
    parts = []
    for d in delays:
        if d:
            seconds = [curves[name, d].reached_s(wanted) for name in ("pipedream", "ASP", "BSP")]
            parts.append(f"{d + 1} devices " + " / ".join("never" if s is None else f"{s:.1f} s" for s in seconds))
    return f"{task.name}: PipeDream / ASP / BSP reach {wanted:.4g} after: " + "; ".join(parts)


def _shown(loss: float) -> float | str:
    return float(loss) if np.isfinite(loss) and loss < 1e3 else "diverges"
