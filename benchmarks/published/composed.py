"""``python -m benchmarks.published.composed``: plans of `Manual` next to the price of a run of their numbers.

A published run is priced from the bill of one stage and formulas for its schedule; here the planner composes the same
run of its stages' plans. Both know the stack ``plain``, a program that does what was traced and overlaps nothing.
"""

from __future__ import annotations

import dataclasses
import time

import click
from rich.console import Console

import autopar
from autopar.cluster import Cluster
from autopar.cost.constants import load_constants
from benchmarks.published.planned import planned
from benchmarks.published.priced import StepPrediction, plan_step
from benchmarks.published.transformer import TrainingPlan, TransformerSpec
from benchmarks.report import Row, table

STACK = "plain"
#: How far the two may be apart.
TOLERANCE = 0.03
#: Part of the optimizer's state that a plan with offload has no room for.
_HOSTED = 0.95


@dataclasses.dataclass(frozen=True)
class Composed:
    """A run that is priced in two ways.

    Args:
        name: of it.
        spec: the model.
        plan: how it is trained.
    """

    name: str
    spec: TransformerSpec
    plan: TrainingPlan

    @property
    def cluster(self) -> Cluster:
        """DGX A100s, as many as it has devices."""
        devices = self.plan.devices
        whole = Cluster.load("dgx-a100", nodes=-(-devices // 8), stack=STACK)
        return whole if devices % 8 == 0 else whole.part(0, devices)

    def planned(self) -> autopar.Plan:
        """The plan that the planner composes of its stages."""
        whole = planned(self.spec, self.plan, self.cluster, STACK)
        if not self.plan.offload:
            return whole
        # A limit that leaves no room for the optimizer's state: its parts that the update needs at once fit.
        state = whole.stages[0].memory.optimizer
        limit = int(whole.peak_memory - _HOSTED * state)
        return planned(self.spec, self.plan, self.cluster, STACK, memory_limit=limit, offload="auto")

    def priced(self) -> StepPrediction:
        """What the benchmark of published runs says."""
        return plan_step(self.spec, self.plan, self.cluster, load_constants(), STACK, traced=True).predict()


_SMALL = TransformerSpec(layers=8, hidden=2048, heads=16, seq=1024, vocab=16384, dtype="f16")
#: Small runs of each kind. In pipelines layers are arrays of their own, and adding up each gradient starts a kernel: of
#: hidden sizes of 1,024 and less these are a tenth of the step, which the bill of stacked layers lacks.
GRID = (
    Composed("one device", _SMALL, TrainingPlan(32, 2)),
    Composed("recomputed", _SMALL, TrainingPlan(32, 2, recompute="full")),
    Composed("tp", _SMALL, TrainingPlan(32, 2, tp=2)),
    Composed("dp", _SMALL, TrainingPlan(64, 2, dp=2)),
    Composed("ZeRO-1", _SMALL, TrainingPlan(64, 2, dp=2, zero=1)),
    # With fewer examples a microbatch activations are less than matrices, and plans send these instead of gradients.
    Composed("ZeRO-3", _SMALL, TrainingPlan(128, 8, dp=2, zero=3)),
    Composed("ZeRO-3, dp 8", _SMALL, TrainingPlan(512, 8, dp=8, zero=3)),
    Composed("ZeRO-3, recomputed", _SMALL, TrainingPlan(128, 8, dp=2, zero=3, recompute="full")),
    Composed("cp", _SMALL, TrainingPlan(32, 2, cp=2)),
    Composed("cp, recomputed", _SMALL, TrainingPlan(32, 2, cp=2, recompute="full")),
    Composed("cp, tp and dp", _SMALL, TrainingPlan(64, 2, tp=2, cp=2, dp=2)),
    Composed("selective", _SMALL, TrainingPlan(32, 2, recompute="selective")),
    Composed("selective, tp", _SMALL, TrainingPlan(32, 2, tp=2, recompute="selective")),
    Composed("selective, pp", _SMALL, TrainingPlan(32, 2, pp=2, recompute="selective")),
    Composed("offload", _SMALL, TrainingPlan(32, 2, recompute="full", offload=True)),
    Composed("pp", dataclasses.replace(_SMALL, layers=4), TrainingPlan(32, 2, pp=2)),
    Composed("pp, gpipe", _SMALL, TrainingPlan(32, 2, pp=2, schedule="gpipe")),
    Composed("pp, interleaved", _SMALL, TrainingPlan(32, 2, pp=2, chunks=2, schedule="interleaved")),
    Composed("pp, zero bubble", _SMALL, TrainingPlan(32, 2, pp=2, schedule="zb-h1")),
    Composed("tp, pp and dp", _SMALL, TrainingPlan(64, 2, tp=2, pp=2, dp=2)),
)
#: Configurations of SC21, table 1, and of the zero-bubble paper.
PUBLISHED = (
    Composed("7.5B", TransformerSpec(36, 4096, 32, 2048, 51200), TrainingPlan(512, 16, tp=4, dp=32, recompute="full")),
    Composed("39.1B", TransformerSpec(48, 8192, 64, 2048, 51200),
             TrainingPlan(1536, 4, tp=8, pp=2, dp=32, recompute="full")),
    Composed("145.6B", TransformerSpec(80, 12288, 96, 2048, 51200),
             TrainingPlan(2304, 2, tp=8, pp=8, dp=24, recompute="full", chunks=2, schedule="interleaved")),
)  # fmt: skip


def row(case: Composed) -> Row:
    """One run in both ways."""
    began_s = time.process_time()
    plan = case.planned()
    planning_s = time.process_time() - began_s
    priced = case.priced()
    return {
        "run": case.name,
        "plan_s": plan.step_time,
        "price_s": priced.step_s,
        "plan / price": plan.step_time / priced.step_s,
        "fullest stage_s": max(s.step_time for s in plan.stages),
        "pipeline_s": priced.pipeline_s,
        "data parallel_s": priced.data_parallel_s,
        "update_s": priced.optimizer_s,
        "planning, CPU s": planning_s,
    }


@click.command()
@click.option("--published", is_flag=True, help="Published sizes too.")
@click.option("--width", default=_SMALL.hidden, show_default=True, help="Hidden size of the small runs.")
@click.argument("names", nargs=-1)
def main(published: bool, width: int, names: tuple[str, ...]) -> None:
    """Prints both prices of the runs of the grid, or of those that are named."""
    spec = dataclasses.replace(_SMALL, hidden=width, ffn=4 * width, head_dim=width // _SMALL.heads)
    small = [dataclasses.replace(c, spec=spec) for c in GRID]
    cases = [c for c in (*small, *(PUBLISHED if published else ())) if not names or c.name in names]
    Console(width=160).print(table("plans next to prices", tuple(row(c) for c in cases)))


if __name__ == "__main__":
    main()
