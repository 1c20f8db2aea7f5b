"""``python -m benchmarks.device --out FILE``: kernels and steps on the first device of this process, as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import click
import jax

import autopar
from autopar._compat.devices import machine_name
from benchmarks.device.kernels import Row, attention, launches, memory_bound, products
from benchmarks.device.options import behaviour_rows, option_rows
from benchmarks.device.steps import measured
from benchmarks.machine import facts

#: Of the step that every option is tried on.
_SIZES = {"layers": 4, "hidden": 768, "heads": 12, "vocab": 16384, "seq": 512, "batch": 16, "dtype": "float32"}
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq": 32, "batch": 8, "dtype": "float32"}


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file to write.")
@click.option(
    "--cluster", "name", default="", help="Cluster file whose device is priced; that of the device unless given."
)
@click.option(
    "--calibrated", default="", help="Another cluster file, as `autopar calibrate` writes; steps are priced by both."
)
@click.option("--seed", default=0, help="Of the sizes that are drawn.")
@click.option("--products", "num_products", default=80, help="Products of drawn sizes; 0 leaves all kernels out.")
@click.option("--steps", "num_steps", default=20, help="Train steps of drawn sizes.")
@click.option("--options/--no-options", default=True, help="Whether one step is run under each option.")
@click.option("--small", is_flag=True, help="Tiny sizes, to see that it works.")
@click.option("--seconds", default=500.0, help="No step is begun after so many seconds.")
def main(
    out: Path,
    name: str,
    calibrated: str,
    seed: int,
    num_products: int,
    num_steps: int,
    options: bool,
    small: bool,
    seconds: float,
) -> None:
    """Measures, and writes after every row what there is so far."""
    until_s = time.monotonic() + seconds
    here = autopar.Cluster.local(figures="list")
    cluster = autopar.Cluster.load(name).part(0, 1) if name else here
    own = autopar.Cluster.load(calibrated).part(0, 1) if calibrated else None
    rows: list[Row] = []
    device = machine_name(jax.devices()[0].platform, jax.devices()[0].device_kind)

    def keep(part: Iterable[Row]) -> None:
        for row in part:
            rows.append(row)
            text = {"device": device, "facts": facts(), "seed": seed, "rows": rows}
            out.write_text(json.dumps(text, indent=1, default=float) + "\n", encoding="utf-8")
            brief = {k: v for k, v in row.items() if k != "kernels"}
            click.echo(json.dumps(brief, default=float), err=True)

    if options:
        keep(behaviour_rows(here))
        with jax.default_matmul_precision("highest"):
            keep(option_rows(here, until_s, **(_TINY if small else _SIZES)))
    if num_products:
        for part in (launches(), products(seed, num_products), memory_bound(), attention()):
            keep(part)
    keep(measured(seed, num_steps, cluster, until_s, own))


if __name__ == "__main__":
    main()
