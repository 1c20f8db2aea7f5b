"""Layer times of the 22B model (``data/seqsel_table4_per_layer_times_22B.csv``) against the model's."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from autopar.cluster import Cluster
from benchmarks.published.dataset import DATA
from benchmarks.published.priced import plan_step
from benchmarks.published.transformer import Constants, TrainingPlan, TransformerSpec

#: Recomputation and sequence parallelism of each row.
_PLANS = {
    "Baseline no recompute": ("none", False),
    "Sequence Parallelism": ("none", True),
    "Baseline with recompute (full)": ("full", False),
    "Selective Recompute": ("selective", False),
    "Selective + Sequence": ("selective", True),
}


@dataclass(frozen=True)
class LayerRow:
    """Predicted and measured seconds of one layer of a microbatch."""

    experiment: str
    forward_s: float
    backward_s: float
    measured_forward_s: float
    measured_backward_s: float


def layer_rows(constants: Constants) -> tuple[LayerRow, ...]:
    """All rows of the table that have times: h = 6144, a = 64, s = 2048, b = 4, t = 8 on a DGX A100."""
    spec = TransformerSpec(layers=48, hidden=6144, heads=64, seq=2048, vocab=51200)
    cluster = Cluster.load("dgx-a100")
    rows = []
    with (DATA / "seqsel_table4_per_layer_times_22B.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["experiment"] not in _PLANS:
                continue
            recompute, sequence_parallel = _PLANS[row["experiment"]]
            plan = TrainingPlan(4, 4, tp=8, recompute=recompute, sequence_parallel=sequence_parallel)
            layer = plan_step(spec, plan, cluster, constants, "megatron").layer()
            measured = (float(row[c]) / 1e3 for c in ("forward_ms", "backward_ms"))
            rows.append(LayerRow(row["experiment"], layer.forward_s, layer.backward_s, *measured))
    return tuple(rows)
