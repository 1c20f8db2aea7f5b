"""Seconds and memory of whole train steps of the examples on one device, measured and planned for."""

from __future__ import annotations

import gc
import glob
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

import autopar
from benchmarks.footprint import footprint_bytes
from examples import gpt, llama, mlp, moe, wide_resnet

Row = dict[str, Any]
_MODULES = {"gpt": gpt, "llama": llama, "mlp": mlp, "moe": moe, "wide_resnet": wide_resnet}
_KERNELS = 40


def cases(seed: int, count: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(example, preset, overrides) drawn by seed, smaller and larger steps of every family."""
    draw = random.Random(seed)
    drawn: list[tuple[str, str, dict[str, Any]]] = []
    while len(drawn) < count:
        name = draw.choice(("gpt", "gpt", "gpt", "llama", "llama", "moe", "wide_resnet", "mlp"))
        dtype = draw.choice(("bfloat16", "bfloat16", "float32"))
        hidden = draw.choice((512, 768, 1024, 1536, 2048, 3072))
        seq, batch = draw.choice((256, 512, 1024, 2048)), draw.choice((2, 4, 8, 16))
        common = {"layers": draw.choice((2, 4, 6, 8)), "seq": seq, "batch": batch, "dtype": dtype}
        if seq * batch > 16384:
            continue
        if name == "gpt":
            more = {
                "scan": draw.random() < 0.4,
                "remat": draw.random() < 0.3,
                "vocab": draw.choice((1024, 32000, 51200)),
            }
            drawn.append((name, "small", {**common, **more, "hidden": hidden, "heads": hidden // 64}))
        elif name == "llama":
            sizes = {
                "hidden": hidden,
                "ffn": 3 * hidden,
                "heads": hidden // 64,
                "kv_heads": hidden // 64 // 2,
                "vocab": 32000,
            }
            drawn.append((name, "small", {**common, **sizes}))
        elif name == "moe":
            sizes = {
                "hidden": min(hidden, 1024),
                "heads": 8,
                "ffn": 4096,
                "vocab": 32000,
                "group": 1024 if seq >= 1024 else seq,
            }
            drawn.append((name, "small", {**common, **sizes, "experts": draw.choice((4, 8))}))
        elif name == "mlp":
            drawn.append((name, "small", {"hidden": 2 * hidden, "batch": draw.choice((256, 1024, 4096))}))
        else:
            channels = {"base_channels": draw.choice((64, 160)), "image": draw.choice((32, 64))}
            drawn.append((name, "small", {"batch": draw.choice((32, 128)), "dtype": dtype, **channels}))
    return drawn


def measured(
    seed: int, count: int, cluster: autopar.Cluster, until_s: float, calibrated: autopar.Cluster | None = None
) -> Iterator[Row]:
    """A row a case until the clock says ``until_s``; what fails says why.

    Args:
        seed: of the cases.
        count: how many.
        cluster: one device, which steps are priced for.
        until_s: of `time.monotonic`.
        calibrated: the same device with figures that were measured; None leaves them out.
    """
    for name, preset, overrides in cases(seed, count):
        if time.monotonic() > until_s:
            return
        row: Row = {"example": name, "preset": preset, "overrides": overrides}
        try:
            row |= _row(name, preset, overrides, cluster, calibrated)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        gc.collect()
        yield row


def _row(
    name: str, preset: str, overrides: dict[str, Any], cluster: autopar.Cluster, calibrated: autopar.Cluster | None
) -> Row:
    step, abstract = _MODULES[name].build(preset, abstract=True, **overrides)
    start = time.perf_counter()
    plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0).plan(*abstract)
    row: Row = {"predicted_s": plan.step_time, "predicted_memory_bytes": plan.peak_memory}
    row["planning_s"] = time.perf_counter() - start
    if calibrated is not None:
        row["calibrated_s"] = autopar.parallelize(step, cluster=calibrated, donate_argnums=0).plan(*abstract).step_time
    _, (state, batch) = _MODULES[name].build(preset, **overrides)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    row["compile_s"] = time.perf_counter() - start
    row["compiled_memory_bytes"] = footprint_bytes(compiled.memory_analysis())
    cost = compiled.cost_analysis()
    row["xla_flops"], row["xla_bytes"] = cost.get("flops"), cost.get("bytes accessed")
    state, row["measured_s"], row["spread_s"] = timed(compiled, state, batch)
    state, row["kernels"] = _kernels(compiled, state, batch)
    decorated = autopar.parallelize(step, cluster=autopar.Cluster.local(figures="list"), donate_argnums=0)
    del compiled
    state, batch = decorated.shard(state, batch)
    row["autopar_s"] = timed(decorated, state, batch)[1]
    return row


def timed(step: Any, state: Any, batch: Any, loops: bool = True) -> tuple[Any, float, float]:
    """State after steps that follow each other, median seconds of one, and half of the spread.

    Args:
        step: gives the next state and metrics.
        state: of the first step; the step may take it over.
        batch: of every step.
        loops: whether a step starts from the state of the one before, or each from the first.
    """
    first = state
    for _ in range(3):
        state, metrics = step(state if loops else first, batch)
    jax.block_until_ready((state, metrics))
    start = time.perf_counter()
    state, metrics = step(state if loops else first, batch)
    jax.block_until_ready((state, metrics))
    runs = max(2, min(200, round(0.15 / (time.perf_counter() - start))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(runs):
            state, metrics = step(state if loops else first, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - start) / runs)
    return state, statistics.median(times), (max(times) - min(times)) / 2


def _kernels(step: Any, state: Any, batch: Any, runs: int = 3) -> tuple[Any, list[list[Any]]]:
    """[name, microseconds a step, count a step] of what the device ran longest, by jax's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        took: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        for plane in data.planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        took[event.name] += event.duration_ns
                        seen[event.name] += 1
    top = took.most_common(_KERNELS)
    rest = sum(took.values()) - sum(ns for _, ns in top)
    rows: list[list[Any]] = [[name, ns / runs / 1e3, seen[name] / runs] for name, ns in top]
    return state, [*rows, ["rest", rest / runs / 1e3, sum(seen.values()) / runs]]
