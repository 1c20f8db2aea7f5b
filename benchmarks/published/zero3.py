"""ZeRO-3 against tensor, pipeline and data parallelism at 175B (SC21, table 2)."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost.constants import Constants
from benchmarks.published.dataset import DATA
from benchmarks.published.priced import predict_plan
from benchmarks.published.transformer import TrainingPlan, TransformerSpec
from benchmarks.report import Row

#: The 175B model of SC21, table 1.
SPEC = TransformerSpec(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
#: Devices of a node of Selene.
_PER_NODE = 8


@dataclass(frozen=True)
class Compared:
    """One row of the table.

    Args:
        partitioned: ZeRO-3; else tensor, pipeline and data parallelism.
        devices: number of devices.
        step_s: predicted seconds of a step.
        measured_s: those that follow from the printed FLOP/s.
    """

    partitioned: bool
    devices: int
    step_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.step_s / self.measured_s - 1


def compared(constants: Constants) -> tuple[Compared, ...]:
    """All rows. ZeRO-3 is DeepSpeed's; the others have tensor parallelism 8 and 12 stages without interleaving."""
    rows = []
    with (DATA / "megatron_sc21_table2_zero3_vs_ptdp.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            devices, batch, microbatch = (int(row[c]) for c in ("gpus", "global_batch", "micro_batch"))
            partitioned = row["scheme"].startswith("ZeRO-3")
            if partitioned:
                plan = TrainingPlan(batch, microbatch, dp=devices, zero=3, recompute="full")
            else:
                plan = TrainingPlan(batch, microbatch, tp=8, pp=12, dp=devices // 96, recompute="full")
            cluster = Cluster.load("dgx-a100", nodes=devices // _PER_NODE)
            stack = "megatron-deepspeed" if partitioned else "megatron"
            step_s = predict_plan(SPEC, plan, cluster, constants, stack).step_s
            # Printed FLOP/s count what is computed again: 4/3 of the model's (SC21, equation 3).
            measured_s = SPEC.model_flops(batch) * 4 / 3 / (devices * float(row["tflops_per_gpu"]) * 1e12)
            rows.append(Compared(partitioned, devices, step_s, measured_s))
    return tuple(rows)


def zero3_rows(constants: Constants) -> tuple[Row, ...]:
    """The table, predicted next to measured."""
    return tuple(
        {
            "plan": "ZeRO-3" if c.partitioned else "tp, pp, dp",
            "devices": c.devices,
            "step_s": c.step_s,
            "measured step_s": c.measured_s,
            "error": c.error,
        }
        for c in compared(constants)
    )
