"""LLaMA 3 405B on 16,384 H100: the plan that is found with everything free beside the degrees of Llama 3's own run.

Its degrees and rate are those of Dubey et al., "The Llama 3 Herd of Models" (2024), table 4: tensor parallel 8, context
parallel 1, pipeline 16, data parallel 128, sequences of 8192, 16 of them a replica, 400 TFLOP/s a device. The paper
leaves the stages on each worker open: one and four are planned. Llama 3 did not recompute; the function here recomputes
layers, in all plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.plan.words import plan_words
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say
from examples import llama

#: Model FLOP/s of a device in the published run.
PUBLISHED_FLOPS = 400e12
#: Sequences of a step, and their tokens.
BATCH, SEQ = 2048, 8192
CLUSTER, NODES, PER_NODE = "dgx-h100", 2048, 8
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Degrees:
    """Numbers of devices by what they share.

    Args:
        tp: a layer's matrices.
        pp: workers of the pipeline.
        dp: replicas.
        chunks: stages on each worker.
        microbatches: of a replica.
    """

    tp: int
    pp: int
    dp: int
    chunks: int
    microbatches: int

    @property
    def options(self) -> Mapping[str, Any]:
        """Of `autopar.parallelize`."""
        manual = autopar.search.Manual(tp=self.tp, pp=self.pp, dp=self.dp, zero=1, chunks=self.chunks)
        return {
            "search": manual,
            "num_stages": self.pp * self.chunks,
            "num_microbatches": self.microbatches,
        }


@dataclass(frozen=True)
class Case:
    """A model on devices.

    Args:
        preset: of the example.
        sizes: that differ from it.
        nodes: of the cluster.
        published: degrees, by stages on each worker.
    """

    preset: str
    sizes: Mapping[str, Any]
    nodes: int
    published: tuple[Degrees, ...]


LLAMA3 = Case("405B", {"batch": BATCH, "seq": SEQ}, NODES, tuple(Degrees(8, 16, 128, chunks, 16) for chunks in (1, 4)))
QUICK = Case("tiny", {"layers": 4, "batch": 16}, 2, (Degrees(4, 2, 2, 1, 2), Degrees(4, 2, 2, 2, 2)))


def published_s() -> float:
    """Seconds of a step of the published run: 6 FLOPs a parameter and token (Kaplan et al., 2020) at its rate."""
    _, (state, _) = llama.build("405B", abstract=True, batch=BATCH, seq=SEQ)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    return 6 * parameters * BATCH * SEQ / (PUBLISHED_FLOPS * NODES * PER_NODE)


def plans(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and options of all that is planned."""
    for degrees in case.published:
        stages = f"{degrees.chunks} stages a worker" if degrees.chunks > 1 else "one stage a worker"
        yield f"Llama 3's degrees, {stages}", degrees.options
    yield "all free", {}


def measure(case: Case, name: str, options: Mapping[str, Any]) -> Row:
    """The row of one plan; its process has done nothing else."""
    jax.config.update("jax_platforms", "cpu")
    step, args = llama.build(case.preset, abstract=True, **case.sizes)
    cluster = autopar.Cluster.load(CLUSTER, nodes=case.nodes)
    began_s = time.process_time()
    row: dict[str, Any] = {"plan": name}
    try:
        parallel = parallelize_with(step, ParallelOptions(cluster=cluster, donate_argnums=(0,), **options))
        plan = parallel.plan(*args)
        row |= {
            "step_s": plan.step_time,
            "stages": plan.num_stages,
            "microbatches": plan.num_microbatches,
            "schedule": plan.content.schedule,
            "mesh": "x".join(str(size) for _, size in plan.stages[0].mesh_axes),
            "peak_bytes": plan.peak_memory,
            "degrees": plan_words(plan.content),
        }
    except autopar.AutoparError as error:
        row["error"] = str(error).partition("\n")[0]
    return row | {"cpu_s": time.process_time() - began_s}


def met(rows: list[Row]) -> bool:
    """Whether the free plan is predicted no slower than any with the published degrees."""
    *published, free = rows
    named = [r["step_s"] for r in published if "step_s" in r]
    return bool(named) and "step_s" in free and free["step_s"] <= min(named) * (1 + _ROUNDING)


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes a tiny model."""
    case = QUICK if quick else LLAMA3
    rows: list[Row] = []
    for name, options in plans(case):
        rows.append(in_new_process(measure, case, name, options))
        say(f"llama3: {rows[-1]}")
    return Report(
        "llama3",
        "a free plan is predicted no slower than one with the degrees of the published run",
        tuple(rows),
        met(rows),
        () if quick else (f"the published run took {published_s():.3g} s a step at its rate, without recomputing",),
        measured=("cpu_s",),
    )
