"""Published runs by the door that users take: the traced step of the model, `Manual`, the stack that ran.

``python -m benchmarks.published.planned`` plans sixteen named runs and says how far the plans' steps are from what was
measured; `benchmarks.published` plans the points of the dataset.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

import autopar
from autopar.cluster import Cluster
from autopar.cluster.stack import StackChoice
from autopar.errors import AutoparError
from autopar.search import Manual
from benchmarks.published.alpa import mixed_step
from benchmarks.published.dataset import DATA, Run, load
from benchmarks.published.free import stack_with
from benchmarks.published.plans import DTYPES, padded_vocab
from benchmarks.published.transformer import Constants, TrainingPlan, TransformerSpec
from benchmarks.report import Row, table
from examples import gpt, llama

_UNLIMITED = 10**15
#: The 175B model of SC21, table 1, and devices of a node of Selene.
GPT_175B = TransformerSpec(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
_PER_NODE = 8
#: Programs in which a compiler decides what the backward pass reads; the others have kernels that are written by hand.
COMPILED = frozenset({"xla", "xla-2021", "plain"})
#: Numbers of the points that are named runs: five of SC21, table 1; both of 22B in Korthikanti, table 5; one of Alpa
#: inside a node; one of vTrain on one node, and one on several.
NAMED = (1, 3, 5, 7, 9, 11, 12, 1894, 132, 22)


def planned(
    spec: TransformerSpec, plan: TrainingPlan, cluster: Cluster, stack: StackChoice, **options: Any
) -> autopar.Plan:
    """The plan of a published run.

    Args:
        spec: the model.
        plan: how it was trained.
        cluster: where.
        stack: the training program.
        options: of `autopar.parallelize`, beside those that follow from the plan.
    """
    program = stack if isinstance(stack, str) else stack.name
    sizes = {
        "layers": spec.layers, "hidden": spec.hidden, "ffn": spec.ffn, "heads": spec.heads, "kv_heads": spec.kv_heads,
        "vocab": padded_vocab(spec, plan), "seq": spec.seq, "batch": plan.global_batch, "dtype": DTYPES[spec.dtype],
        "remat": plan.recompute == "full", "by_hand": program not in COMPILED,
    }  # fmt: skip
    if spec.gated:
        step, args = llama.build(abstract=True, eight_bits=spec.dtype.startswith("f8"), **sizes)
    elif program == "xla-2021" and plan.num_microbatches == 1 and plan.recompute == "none":
        step, args = mixed_step(dataclasses.replace(spec, vocab=padded_vocab(spec, plan)), plan.global_batch)
    else:
        selective = plan.recompute == "selective"
        step, args = gpt.build(abstract=True, scan=True, tied=spec.tied, clip=1.0, remat_attention=selective, **sizes)
    named = Manual(tp=plan.tp, pp=plan.pp, dp=plan.dp, cp=plan.cp, zero=plan.zero, chunks=plan.chunks)
    asked = {"schedule": plan.schedule} if plan.pp > 1 and plan.chunks == 1 else {}
    given = {"offload": "none", "memory_limit": _UNLIMITED, **asked, **options}
    return autopar.parallelize(
        step, cluster=dataclasses.replace(cluster, stack=stack), search=named, num_stages=plan.pp * plan.chunks,
        num_microbatches=plan.num_microbatches, donate_argnums=0, **given,
    ).plan(*args)  # fmt: skip


@dataclass(frozen=True)
class NamedRun:
    """A run that is planned.

    Args:
        name: of it.
        dataset: where it is from.
        spec: the model.
        plans: how it was trained; several where the source does not say: the fastest counts.
        cluster: where.
        stack: the training program.
        measured_s: seconds of a step.
    """

    name: str
    dataset: str
    spec: TransformerSpec
    plans: tuple[TrainingPlan, ...]
    cluster: Cluster
    stack: StackChoice
    measured_s: float

    def step_s(self) -> float:
        """Seconds of a step by the plan that a user gets."""
        return min(planned(self.spec, plan, self.cluster, self.stack).step_time for plan in self.plans)

    @staticmethod
    def of(run: Run, constants: Constants | None = None) -> NamedRun:
        """A point of the dataset, with the fitted ones of ``constants`` if they are given."""
        assert run.measured_s is not None
        stack = run.stack if constants is None else stack_with(run.stack, constants)
        return NamedRun(str(run.point), run.dataset, run.spec, run.plans, run.cluster, stack, run.measured_s)


def zero3_runs() -> Iterator[NamedRun]:
    """ZeRO-3 against tensor, pipeline and data parallelism at 175B (SC21, table 2).

    ZeRO-3 is DeepSpeed's; the others have tensor parallelism 8 and 12 stages without interleaving.
    """
    with (DATA / "megatron_sc21_table2_zero3_vs_ptdp.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            devices, batch, microbatch = (int(row[c]) for c in ("gpus", "global_batch", "micro_batch"))
            partitioned = row["scheme"].startswith("ZeRO-3")
            if partitioned:
                plan = TrainingPlan(batch, microbatch, dp=devices, zero=3, recompute="full")
            else:
                plan = TrainingPlan(batch, microbatch, tp=8, pp=12, dp=devices // 96, recompute="full")
            cluster = Cluster.load("dgx-a100", nodes=devices // _PER_NODE)
            # Printed FLOP/s count what is computed again: 4/3 of the model's (SC21, equation 3).
            measured_s = GPT_175B.model_flops(batch) * 4 / 3 / (devices * float(row["tflops_per_gpu"]) * 1e12)
            scheme, stack = ("ZeRO-3", "megatron-deepspeed") if partitioned else ("PTD-P", "megatron")
            yield NamedRun(f"{scheme} {devices}", "SC21 Table 2", GPT_175B, (plan,), cluster, stack, measured_s)


def named_runs() -> Iterator[NamedRun]:
    """The sixteen."""
    points = {run.point: run for run in load()}
    yield from (NamedRun.of(points[n]) for n in NAMED)
    yield from zero3_runs()


def refusal(run: Run) -> str:
    """Why neither an example nor `Manual` can say a run; "" where they can."""
    if all(plan.stages_together and plan.dp > 1 for plan in run.plans):
        return "stages share nodes and replicas lie on other nodes; `Manual` has replicas next to each other"
    if any(plan.ep > 1 for plan in run.plans):
        return "no example has these experts"
    return ""


def row(run: NamedRun) -> Row:
    """A run, its plan's step and how far off it is."""
    began_s = time.process_time()
    made: dict[str, Any] = {"run": run.name, "dataset": run.dataset, "stack": str(run.stack)}
    made["measured_s"] = run.measured_s
    try:
        step_s = run.step_s()
    except (AutoparError, ValueError) as error:
        return made | {"error": None, "why": str(error).partition("\n")[0]}
    return made | {
        "step_s": step_s,
        "error": step_s / run.measured_s - 1,
        "planning, CPU s": time.process_time() - began_s,
    }


def by_dataset(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Errors by dataset, and the mean over all runs."""
    made = []
    for dataset in (*dict.fromkeys(r["dataset"] for r in rows), "all"):
        errors = [r["error"] for r in rows if dataset in (r["dataset"], "all") and r["error"] is not None]
        if errors:
            mean, bias = statistics.mean(map(abs, errors)), statistics.mean(errors)
            made.append(
                {"dataset": dataset, "runs": len(errors), "mean": mean, "bias": bias, "worst": max(errors, key=abs)}
            )
    return tuple(made)


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Plans the named runs, those of NAMES alone if there are any, and prints how far off the plans are."""
    rows = []
    for run in named_runs():
        if not names or run.name in names or run.dataset in names:
            rows.append(row(run))
            click.echo(rows[-1], err=True)
    console = Console(width=160)
    console.print(table("plans next to published runs", tuple(rows)))
    console.print(table("by dataset", by_dataset(rows)))


if __name__ == "__main__":
    main()
