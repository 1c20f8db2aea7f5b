"""Planning problems drawn by seed: seconds to a plan, bounds that hold, and whether free is as fast as asked.

Every case is a model (all examples, and families that no example has), sizes of it, a cluster of 1 to 4,096 devices, a
batch of 8 to 4,096, a memory limit from loose to an eighth, and what is given: nothing, the stages and microbatches, or
the mesh. Case k of a seed is the same whatever the number of cases. Nothing is allocated. A plan that takes more CPU
seconds than its limit is a miss, and the next case follows.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

import autopar
from autopar import Cluster, Plan
from autopar.api.parallel_function import ParallelFunction
from autopar.plan.text import USELESS
from benchmarks.families import FAMILIES
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import gpt, llama, mlp, moe, wide_resnet

CASES = 20
SEED = 0

#: Wall seconds to the first plan near the final one: median, 95th of a hundred, worst.
TARGETS_S = (2.0, 8.0, 20.0)

#: Times the step of the final plan that is near it.
NEAR = 1.01

#: Times the least of what is asked for by name that a free plan may take.
AS_FAST = 1.01

#: CPU seconds of the planning process after which a plan is given up.
CPU_LIMIT_S = 120.0

_CLUSTERS = ("dgx-a100", "dgx-h100", "p3.16xlarge", "dgx-a800", "h200", "t4")
_NODES = (1, 1, 1, 2, 4, 8, 16, 64, 128, 512)
_SHARES = (None, None, 1.0, 0.5, 0.25, 0.125)  # of a device's memory


@dataclass(frozen=True)
class Case:
    """A drawn problem.

    Args:
        name: of the row.
        family: name of the model's builder.
        preset: of an example; "" for other families.
        sizes: arguments of the builder.
        cluster: name of its file.
        nodes: of it.
        options: of `autopar.parallelize`.
        asked: options of plans that a free one is compared with; none where something is given.
    """

    name: str
    family: str
    preset: str
    sizes: Mapping[str, Any]
    cluster: str
    nodes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    asked: tuple[Mapping[str, Any], ...] = ()


_EXAMPLES: Mapping[str, Any] = {
    "gpt": gpt.build,
    "llama": llama.build,
    "mlp": mlp.build,
    "moe": moe.build,
    "wide_resnet": wide_resnet.build,
}
_PRESETS: Mapping[str, Sequence[str]] = {
    "gpt": ("125M", "1.3B", "6.7B", "39B"),
    "llama": ("8B", "70B"),
    "mlp": ("small", "large"),
    "moe": ("small",),
    "wide_resnet": ("tiny",),
}


def draw(seed: int, number: int) -> Case:
    """Case ``number`` of a seed."""
    random = np.random.default_rng((seed, number))
    family = str(random.choice([*_EXAMPLES, *FAMILIES]))
    preset = str(random.choice(_PRESETS[family])) if family in _PRESETS else ""
    cluster, nodes = str(random.choice(_CLUSTERS)), int(random.choice(_NODES))
    devices = Cluster.load(cluster, nodes=nodes).num_devices
    batch = max(2 ** int(random.integers(3, 13)), 8)
    sizes: dict[str, Any] = {"batch": batch}
    if family in ("gpt", "llama", "mlp"):
        sizes["layers"] = int(random.choice([2, 4, 8, 12, 24]))
    if family == "gpt" and random.random() < 0.5:
        sizes["scan"] = True
    share = random.choice(np.array(_SHARES, dtype=object))
    options: dict[str, Any] = {}
    if share is not None:
        memory = Cluster.load(cluster, nodes=nodes).memory_bytes
        options["memory_limit"] = int(memory * share)
    given = str(random.choice(["free", "free", "one stage", "pipeline", "mesh"]))
    asked: tuple[Mapping[str, Any], ...] = ()
    if given == "one stage":
        options["num_stages"] = 1
    elif given == "pipeline" and devices > 1:
        options.update(num_stages=2, num_microbatches=min(batch, int(random.choice([2, 4, 8, 16]))))
    elif given == "mesh" and devices > 1:
        inner = 2 ** int(random.integers(0, int(math.log2(devices)) + 1))
        options.update(num_stages=1, mesh_shape=(devices // inner, inner) if 1 < inner < devices else (devices,))
    elif devices > 1:
        counts = [n for n in (1, 4, 16) if n <= batch]
        asked = ({"num_stages": 1}, *({"num_stages": s, "num_microbatches": n} for s in (2, 4, 8) for n in counts))
        asked = tuple(a for a in asked if a["num_stages"] <= devices)
    name = f"{number}: {family} {preset} {given}, batch {batch}, {devices} devices"
    return Case(name, family, preset, sizes, cluster, nodes, options, asked)


def parallel_of(case: Case, **more: Any) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]:
    """The decorated step of a case with ``more`` options, and its abstract arguments."""
    builder: Callable[..., Any] = _EXAMPLES.get(case.family) or FAMILIES[case.family]
    step, args = builder(case.preset, abstract=True, **case.sizes) if case.preset else builder(**case.sizes)
    cluster = Cluster.load(case.cluster, nodes=case.nodes)
    return autopar.parallelize(step, cluster=cluster, donate_argnums=0, **{**case.options, **more}), args


def plan_of(case: Case, **more: Any) -> Plan:
    """The plan of a case, with ``more`` options."""
    parallel, args = parallel_of(case, **more)
    return parallel.plan(*args)


class CpuLimitError(BaseException):
    """A plan took more CPU seconds than its limit; no `Exception`, so that nothing inside of the planner catches it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises `CpuLimitError` inside once this process has taken ``seconds`` more of CPU time.

    It is raised as soon as the interpreter runs again: a call of compiled code is not interrupted.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def stop(number: int, frame: FrameType | None) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        raise CpuLimitError(f"more than {seconds:g} CPU s")

    before = signal.signal(signal.SIGXCPU, stop)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        signal.signal(signal.SIGXCPU, before)


def measure(case: Case, compare: bool, limit_s: float = CPU_LIMIT_S) -> Row:
    """The row of a case; with ``compare`` its free plan is laid next to plans that were asked for by name."""
    jax.config.update("jax_platforms", "cpu")
    row: dict[str, Any] = {"case": case.name}
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    try:
        with cpu_limit(limit_s):
            plan = plan_of(case)
        row.update(step_s=plan.step_time, bound_s=plan.search.lower_bound, stages=plan.num_stages)
        row.update(microbatches=plan.num_microbatches, phases=_text(plan.phases))
        row["bound_holds"] = (plan.search.lower_bound or 0.0) <= plan.step_time
        row["over_estimates"] = over_estimates(plan)
    except (autopar.AutoparError, CpuLimitError) as error:
        row["error"] = str(error) if isinstance(error, CpuLimitError) else type(error).__name__
        row["in_time"] = not isinstance(error, CpuLimitError)
    row["wall_s"], row["cpu_s"] = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    row["near_s"] = row["wall_s"] if "step_s" not in row else first_near_s(plan, row["wall_s"])
    row["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    if compare and case.asked and "step_s" in row:
        asked_s = [(_seconds(case, asked, limit_s), asked) for asked in case.asked]
        fastest_s, fastest = min(((s, a) for s, a in asked_s if s is not None), default=(None, {}), key=lambda p: p[0])
        if fastest_s is not None:
            row.update(times_the_best_asked=row["step_s"] / fastest_s, best_asked=_text(fastest.items()))
    return row


def over_estimates(plan: Plan) -> dict[str, list[float]]:
    """By relaxation the times of its estimate that the plans of its regions take, as the trail has them."""
    ratios: dict[str, list[float]] = {}
    for row in plan.search.trail:
        if row.estimate_s and row.seconds is not None:
            ratios.setdefault(row.why, []).append(row.seconds / row.estimate_s)
    return ratios


def first_near_s(plan: Plan, wall_s: float) -> float:
    """Seconds until a plan within `NEAR` of the final one was known.

    Args:
        plan: the final one.
        wall_s: seconds until it was there, with those of building the function before planning began.
    """
    before_s = max(wall_s - sum(s for _, s in plan.phases), 0.0)
    times = (at_s for at_s, step_s in plan.search.incumbents if step_s <= NEAR * plan.step_time)
    return min(before_s + next(times, wall_s), wall_s)


def _text(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in pairs)


def _usages() -> tuple[resource.struct_rusage, ...]:
    """Of this process, and of the largest that it began and that has ended."""
    return resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)


def _cpu_s() -> float:
    return sum(u.ru_utime + u.ru_stime for u in _usages())


def _seconds(case: Case, asked: Mapping[str, Any], limit_s: float) -> float | None:
    try:
        with cpu_limit(limit_s):
            return plan_of(case, **asked).step_time
    except (autopar.AutoparError, CpuLimitError):
        return None


def run(
    quick: bool,
    say: Say,
    seed: int = SEED,
    cases: int = CASES,
    first: int = 0,
    compare: bool = True,
    limit_s: float = CPU_LIMIT_S,
    file: Path | None = None,
) -> Report:
    """The benchmark.

    Args:
        quick: whether two cases are taken and none is compared.
        say: prints progress.
        seed: of what is drawn.
        cases: how many are.
        first: number of the first.
        compare: whether free plans are laid next to plans that are asked for by name.
        limit_s: CPU seconds after which a plan is given up.
        file: where the rows so far are written after each case, as JSON; None keeps them.
    """
    rows: list[Row] = []
    for number in range(first, first + (2 if quick else cases)):
        case = draw(seed, number)
        say(f"drawn: {case.name}")
        began_s = time.perf_counter()
        try:
            rows.append(in_new_process(measure, case, compare and not quick, limit_s))
        except BrokenProcessPool:  # the system ended it: memory
            wall_s = time.perf_counter() - began_s
            seconds = dict.fromkeys(("near_s", "wall_s", "cpu_s"), wall_s)
            rows.append({"case": case.name, "error": "ended", "in_time": False, **seconds})
        if file is not None:
            file.write_text(json.dumps(rows, indent=1, default=float) + "\n", encoding="utf-8")
    return summary(rows, seed)


def summary(rows: Sequence[Row], seed: int) -> Report:
    """The report of measured rows."""
    firsts = sorted(float(row["near_s"]) for row in rows)
    walls = sorted(float(row["wall_s"]) for row in rows)
    cpus = sorted(float(row["cpu_s"]) for row in rows)
    figures = [(statistics.median(s), s[math.ceil(0.95 * len(s)) - 1], s[-1]) for s in (firsts, walls, cpus)]
    ratios = [float(r["times_the_best_asked"]) for r in rows if r.get("times_the_best_asked") is not None]
    bounds = all(row.get("bound_holds", True) for row in rows)
    fast = all(ratio <= AS_FAST for ratio in ratios)
    in_time = all(found <= target for found, target in zip(figures[0], TARGETS_S, strict=True))
    in_time = in_time and all(row.get("in_time", True) for row in rows)
    names = (f"to {NEAR:g} of the final plan, wall", "wall", "CPU")
    notes = tuple(
        f"{name} s: median {median:.2f}, 95th of 100 {high:.2f}, worst {worst:.2f}"
        for name, (median, high, worst) in zip(names, figures, strict=True)
    )
    gaps = sorted(1 - float(r["bound_s"] or 0.0) / float(r["step_s"]) for r in rows if r.get("step_s"))
    if gaps:
        useful = sum(gap <= USELESS for gap in gaps)
        notes += (
            f"gaps to the bound: median {statistics.median(gaps):.1%}, {useful} of {len(gaps)} below {USELESS:.0%}",
        )
    ratios_of: dict[str, list[float]] = {}
    for row in rows:
        for name, some in row.get("over_estimates", {}).items():
            ratios_of.setdefault(name, []).extend(some)
    notes += tuple(
        f"plans over {name}: {len(some)}; least, median and most "
        f"{min(some):.3f}, {statistics.median(some):.3f}, {max(some):.3f}"
        for name, some in sorted(ratios_of.items())
    )
    compared = f"free against asked: {len(ratios)} cases, worst {max(ratios, default=1.0):.4f}"
    target = f"median {TARGETS_S[0]}, 95th {TARGETS_S[1]}, worst {TARGETS_S[2]} s; bounds hold; free <= {AS_FAST} asked"
    return Report(
        "drawn",
        target,
        tuple(rows),
        bounds and fast and in_time,
        (f"seed {seed}", *notes, compared),
        measured=("wall_s", "cpu_s"),
    )
