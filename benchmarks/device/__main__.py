"""``python -m benchmarks.device --out FILE``: kernels and steps on the first device of this process, as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import jax

import autopar
from autopar.runtime.measuring import machine_name
from benchmarks.device.kernels import Row, attention, launches, memory_bound, products
from benchmarks.device.steps import measured
from benchmarks.machine import facts


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file to write.")
@click.option("--cluster", "name", default="dgx-h100", help="Cluster file whose device is priced.")
@click.option("--seed", default=0, help="Of the sizes that are drawn.")
@click.option("--products", "num_products", default=80, help="Products of drawn sizes; 0 leaves all kernels out.")
@click.option("--steps", "num_steps", default=20, help="Train steps of drawn sizes.")
@click.option("--seconds", default=500.0, help="No step is begun after so many seconds.")
def main(out: Path, name: str, seed: int, num_products: int, num_steps: int, seconds: float) -> None:
    """Measures, and writes after every row what there is so far."""
    until_s = time.monotonic() + seconds
    cluster = autopar.Cluster.load(name).part(0, 1)
    rows: list[Row] = []
    device = machine_name(jax.devices()[0])

    def keep(row: Row) -> None:
        rows.append(row)
        text = {"device": device, "facts": facts(), "seed": seed, "rows": rows}
        out.write_text(json.dumps(text, indent=1, default=float) + "\n", encoding="utf-8")
        brief = {k: v for k, v in row.items() if k != "kernels"}
        click.echo(json.dumps(brief, default=float), err=True)

    if num_products:
        for part in (launches(), products(seed, num_products), memory_bound(), attention()):
            for row in part:
                keep(row)
    for row in measured(seed, num_steps, cluster, until_s):
        keep(row)


if __name__ == "__main__":
    main()
