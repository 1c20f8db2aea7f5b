"""The published Megatron configurations of GPT from 1.7B to 1T parameters next to our plans, by one cost model.

Models, grids and batches are those of Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
(SC'21), table 1: sequences of 2048, a vocabulary of 51200, half precision, every layer recomputed, DGX A100 80 GB. The
table does not give microbatches. Those of 1.7B, 7.5B, 39.1B, 145.6B and 529.6B, and the chunks of the interleaved
schedule, are those of the published runs in ``published/data``, which also has their seconds; for the others they were
chosen here, like those of their neighbours. Seconds are predicted for both plans; the measured ones say how near the
prediction of the published configuration is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar.schedule import get
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import gpt

#: Devices of a node of `CLUSTER`.
CLUSTER, PER_NODE = "dgx-a100", 8
#: Of one of its devices.
MEMORY_BYTES = autopar.Cluster.load(CLUSTER).memory_bytes
#: More take minutes to plan.
MOST_STAGES = 128
#: Times as much a published configuration may have that by our count does not fit.
BEYOND = 2
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A published configuration.

    Args:
        name: parameters of the model.
        heads, hidden, layers: of the model.
        tp, pp: devices that share a layer's matrices; pipeline stages, chunks of a worker not counted.
        devices: all.
        batch: sequences a step.
        microbatch: sequences that a pipeline takes at once.
        chunks: stages a worker has: from 2 on the schedule is interleaved.
        measured_s: seconds of a step, where published.
        vocab, seq: of the model.
    """

    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    microbatch: int
    chunks: int = 1
    measured_s: float | None = None
    vocab: int = 51200
    seq: int = 2048

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.devices // (self.tp * self.pp)

    @property
    def count(self) -> int:
        """Microbatches."""
        return self.batch // (self.dp * self.microbatch)


CASES = (
    Case("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.528),
    Case("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16),
    Case("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 3.696),
    Case("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8),
    Case("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 14.453),
    Case("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2),
    Case("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 24.817),
    Case("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2),
    Case("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 54.085),
    Case("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1),
)
QUICK = (Case("tiny", 8, 64, 4, 4, 2, 16, 32, 2, vocab=128, seq=16),)


@dataclass(frozen=True)
class Way:
    """A way to plan a case.

    Args:
        name: of the way.
        whose: "published", "ours", or "megatron": the best of all grids of tensor and data parallelism in a stage.
        options: of `autopar.parallelize`.
    """

    name: str
    whose: str
    options: Mapping[str, Any]


def least_bubble(case: Case) -> tuple[int, int, int]:
    """Workers, chunks and microbatches with the least bubble of interleaved 1F1B, (p-1) / (v*m).

    Workers are half as many as published at least, the others are replicas; blocks are dealt evenly, and microbatches
    have the published size.
    """
    found = []
    for workers in range(max(2, -(-case.pp // 2)), case.pp + 1):
        if case.devices % (workers * PER_NODE) or case.layers % workers:
            continue
        count, rest = divmod(case.batch, case.devices // (workers * case.tp) * case.microbatch)
        if rest or count % workers:
            continue
        chunks = min(case.layers // workers, MOST_STAGES // workers)
        while case.layers % (workers * chunks):
            chunks -= 1
        if chunks > 1:
            found.append(((workers - 1) / (chunks * count), workers, chunks, count))
    return min(found)[1:]


def ways(case: Case) -> Iterator[Way]:
    """All ways in which a case is planned."""
    stages, count = case.pp * case.chunks, case.count
    manual = autopar.search.Manual(tp=case.tp, pp=case.pp, dp=case.dp, chunks=case.chunks)
    # The blocks of the model are checkpointed by the user's function, which `Manual` leaves as it is.
    yield Way("published", "published", {"search": manual, "num_stages": stages, "num_microbatches": count})
    yield Way("its stages and microbatches", "ours", {"num_stages": case.pp, "num_microbatches": count})
    if case.chunks > 1:
        schedule = get("interleaved", chunks=case.chunks)
        chunked = {"num_stages": stages, "num_microbatches": count, "schedule": schedule}
        yield Way("its chunks too", "ours", chunked)
        workers, chunks, microbatches = least_bubble(case)
        schedule = get("interleaved", chunks=chunks)
        chunked = {"num_stages": workers * chunks, "num_microbatches": microbatches, "schedule": schedule}
        yield Way("chunks of the least bubble", "ours", chunked)
    yield Way("all free", "ours", {})
    grid = {"search": "megatron", "num_stages": case.pp, "num_microbatches": count}
    yield Way("grids", "megatron", grid)
    if case.pp == 1:
        yield Way("grids, any microbatches", "megatron", {"search": "megatron", "num_stages": 1})


def measure(case: Case) -> tuple[Row, ...]:
    """A row for each way to plan a case; its process has done nothing else."""
    jax.config.update("jax_platforms", "cpu")
    found: list[Row] = []
    for way in ways(case):
        found.append(planned(case, way))
        if way.whose == "published" and "error" in found[-1]:
            # By our count it does not fit, and it ran.
            beyond = {**way.options, "memory_limit": BEYOND * MEMORY_BYTES}
            found.append(planned(case, Way("published, in more memory", "published", beyond)))
    return tuple(found)


def planned(case: Case, way: Way) -> Row:
    """The row of one way."""
    sizes = {f: getattr(case, f) for f in ("heads", "hidden", "layers", "vocab", "seq", "batch")}
    step, args = gpt.build("tiny", abstract=True, scan=True, remat=True, dtype="bfloat16", **sizes)
    cluster = autopar.Cluster.load(CLUSTER, nodes=case.devices // PER_NODE)
    row: dict[str, Any] = {"case": case.name, "whose": way.whose, "way": way.name}
    began_s = time.perf_counter()
    try:
        plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **way.options).plan(*args)
        row |= {
            "step_s": plan.step_time,
            "stages": plan.num_stages,
            "microbatches": plan.num_microbatches,
            "schedule": plan.content.schedule,
            "device_peak_bytes": autopar.simulate(plan).peak_memory,
        }
    except autopar.AutoparError as error:
        row["error"] = str(error).partition("\n")[0]
    return row | {"wall_s": time.perf_counter() - began_s}


def summary(case: Case, rows: Sequence[Row]) -> Row:
    """One row of a case from those of its ways: the best of each kind next to each other.

    Ours must fit the memory with all stages of a worker together; the others count whatever they need: the published
    one ran.
    """

    def best_of(whose: str) -> Row:
        found = [r for r in rows if r["whose"] == whose and "step_s" in r]
        if whose == "ours":
            found = [r for r in found if r["device_peak_bytes"] <= MEMORY_BYTES]
        return min(found, key=lambda r: r["step_s"], default={})

    best = {whose: best_of(whose) for whose in ("published", "ours", "megatron")}
    ours, published, grid = best["ours"], best["published"], best["megatron"]
    return {
        "case": case.name,
        "devices": case.devices,
        "published_s": published.get("step_s"),
        "ours_s": ours.get("step_s"),
        "ours / published": _ratio(ours, published),
        "ours / best grid": _ratio(ours, grid),
        "way": ours.get("way"),
        "stages": ours.get("stages"),
        "microbatches": ours.get("microbatches"),
        "schedule": ours.get("schedule"),
        "published_peak_bytes": published.get("device_peak_bytes"),
        "ours_peak_bytes": ours.get("device_peak_bytes"),
        "measured_s": case.measured_s,
        "published / measured": _ratio(published, {"step_s": case.measured_s}),
        "planning_s": ours.get("wall_s"),
    }


def _ratio(above: Row, below: Row) -> float | None:
    return above["step_s"] / below["step_s"] if above.get("step_s") and below.get("step_s") else None


def met(row: Row) -> bool:
    """Whether our plan is no slower than the published configuration, nor than the best grid where one fits."""
    ratio, grid = row["ours / published"], row["ours / best grid"]
    return ratio is not None and ratio <= 1 + _ROUNDING and (grid is None or grid <= 1 + _ROUNDING)


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes a tiny model."""
    rows: list[Row] = []
    every: list[Row] = []
    for case in QUICK if quick else CASES:
        say(f"megatron: {case.name}")
        found = in_new_process(measure, case)
        every += found
        rows.append(summary(case, found))
        say(f"megatron: {case.name}: {rows[-1]}")
    return Report(
        "megatron",
        "no plan slower than the published configuration, or than the best grid",
        tuple(rows),
        all(map(met, rows)),
        (
            "seconds are predicted; planning_s: wall seconds from function to our plan",
            "peak bytes: the fullest device of the simulated step",
        ),
        (("megatron, all ways", tuple(every)),),
        measured=("planning_s", "wall_s"),
    )
