"""Seconds to a plan of one stage of LLaMA with batch sizes drawn by seed, all meshes and microbatches free."""

from __future__ import annotations

import math
import statistics
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from benchmarks.drawn import CPU_LIMIT_S, CpuLimitError, cpu_limit
from benchmarks.large import Case
from benchmarks.large import measure as measure_large
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import llama

#: Name, preset, nodes of eight H100 and wall seconds within which there must be a plan.
MODELS = (("llama 8B on 8", "8B", 1, 5.0), ("llama 8B on 8x8", "8B", 8, 5.0), ("llama 70B on 32x8", "70B", 32, 10.0))
BATCHES = 20
SEED = 0


def draw(seed: int, number: int) -> int:
    """Batch ``number`` of a seed: 8 to 2,048, half of them multiples of 8."""
    random = np.random.default_rng((seed, number))
    if random.random() < 0.5:
        return 8 * int(math.exp(random.uniform(0.0, math.log(256))))
    return int(math.exp(random.uniform(math.log(8), math.log(2048))))


def measure(case: Case, limit_s: float) -> Row:
    """The row of a case, or that it took more CPU seconds than ``limit_s``."""
    try:
        with cpu_limit(limit_s):
            return measure_large(case)
    except CpuLimitError as error:
        return {"case": case.name, "error": str(error), "wall_s": limit_s, "cpu_s": limit_s, "target_s": case.target_s}


def run(quick: bool, say: Say, seed: int = SEED, batches: int = BATCHES, limit_s: float = CPU_LIMIT_S) -> Report:
    """The benchmark; ``quick`` takes the smallest model with one batch size."""
    rows: list[Row] = []
    notes: list[str] = []
    for name, preset, nodes, target_s in MODELS[:1] if quick else MODELS:
        of_model: list[Row] = []
        for number in range(1 if quick else batches):
            batch = draw(seed, number)
            sizes: dict[str, Any] = {"batch": batch, "layers": 2} if quick else {"batch": batch}
            asked = {"num_stages": 1}
            case = Case(f"{name}, batch {batch}", llama.build, preset, "dgx-h100", nodes, target_s, sizes, asked)
            say(f"batches: {case.name}")
            try:
                of_model.append(in_new_process(measure, case, limit_s))
            except BrokenProcessPool:
                ended = {"case": case.name, "error": "ended", "wall_s": limit_s, "cpu_s": limit_s, "target_s": target_s}
                of_model.append(ended)
        rows += of_model
        cpus = sorted(float(row["cpu_s"]) for row in of_model)
        notes.append(f"{name}: CPU s: median {statistics.median(cpus):.2f}, worst {cpus[-1]:.2f}")
    met = all(row["wall_s"] <= row["target_s"] for row in rows)
    target = "a plan, or that nothing fits, within 5 s (8B) and 10 s (70B)"
    return Report("batches", target, tuple(rows), met, (f"seed {seed}", *notes), measured=("wall_s", "cpu_s"))
