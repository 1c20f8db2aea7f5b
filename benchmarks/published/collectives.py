"""All-reduces of ``data/collectives_measured.csv`` against the model's network."""

from __future__ import annotations

import csv
import statistics
import zlib
from dataclasses import dataclass

from autopar.cluster import Cluster
from benchmarks.published.dataset import DATA
from benchmarks.published.transformer import Constants
from benchmarks.published.transformer.network import TransformerNetwork
from benchmarks.report import Row

#: Cluster file by the start of a row's hardware: networks that a file describes.
CLUSTERS = {
    "one A100 node": "dgx-a100",
    "DGX H100 cluster": "dgx-h100",
    "H100 cluster (arXiv": "dgx-h100",
    "AWS p5.48xlarge (8x H100": "dgx-h100",
    "AWS 2x p5.48xlarge (H100, 32": "dgx-h100",
    "one 8x H200": "h200",
    "AWS p6-b200 (8x B200)": "b200",
}


@dataclass(frozen=True)
class Reduction:
    """One measured all-reduce."""

    hardware: str
    cluster: Cluster
    ranks: int
    bytes: float
    measured_s: float
    fitted: bool

    def error(self, constants: Constants) -> float:
        """Predicted over measured, less one."""
        network = TransformerNetwork.of(self.cluster, constants.network)
        return network.collective_s("all-reduce", self.bytes, self.ranks, 1) / self.measured_s - 1


def reductions() -> tuple[Reduction, ...]:
    """Rows with sizes and times on networks that a cluster file describes; half of them are fitted."""
    found = []
    with (DATA / "collectives_measured.csv").open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            name = next((c for start, c in CLUSTERS.items() if row["hardware"].startswith(start)), None)
            if (
                name is None
                or row["collective"] != "all_reduce"
                or not row["size_bytes"].isdigit()
                or not row["time_us"]
            ):
                continue
            found.append(
                Reduction(
                    row["hardware"],
                    Cluster.load(name),
                    int(row["ranks"]),
                    float(row["size_bytes"]),
                    float(row["time_us"]) * 1e-6,
                    zlib.crc32(str(number).encode()) % 2 == 0,
                )
            )
    return tuple(found)


def collective_rows(constants: Constants) -> tuple[Row, ...]:
    """Errors by hardware and part."""
    found = reductions()
    rows = []
    for hardware in dict.fromkeys(r.hardware for r in found):
        for part, fitted in (("fitted", True), ("held out", False)):
            errors = [abs(r.error(constants)) for r in found if r.hardware == hardware and r.fitted == fitted]
            if errors:
                rows.append(
                    {
                        "hardware": hardware,
                        "part": part,
                        "all-reduces": len(errors),
                        "mean": statistics.mean(errors),
                        "median": statistics.median(errors),
                        "worst": max(errors),
                    }
                )
    return tuple(rows)
