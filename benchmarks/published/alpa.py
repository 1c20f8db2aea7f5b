"""``python -m benchmarks.published.alpa``: plans that are found for Alpa's GPTs, against the steps that Alpa published.

The models are those of its weak scaling inside a node (10 layers, 8 sequences of 1,024 tokens, V100s of 32 GB); each is
planned for the program that XLA makes, without pipeline. A found plan is to be as fast as the one that Alpa's integer
program found, the price of the published plan as long as its measured step.
"""

from __future__ import annotations

import dataclasses

import click
from rich.console import Console

import autopar
from autopar.cost.transformer import load_constants
from benchmarks.published.dataset import Run, load
from benchmarks.published.score import score
from benchmarks.report import Row, table
from examples import gpt

_DATASET = "Alpa intra-op weak scaling"


def found_step(run: Run, batch: int) -> autopar.Plan:
    """The plan of a run's model on its cluster, without pipeline.

    Args:
        run: the run.
        batch: sequences a step.
    """
    spec = run.spec
    step, args = gpt.build(
        abstract=True, scan=True, layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn, heads=spec.heads,
        vocab=spec.vocab, seq=spec.seq, batch=batch, dtype="float16",
    )  # fmt: skip
    cluster = dataclasses.replace(run.cluster, stack="xla")
    return autopar.parallelize(step, cluster=cluster, donate_argnums=0, num_stages=1).plan(*args)


def rows(most_devices: int = 8) -> tuple[Row, ...]:
    """Found and published steps, by number of devices.

    Args:
        most_devices: larger runs are left out.
    """
    constants, made = load_constants(), []
    for run in load():
        devices = run.cluster.num_devices
        given = run.measured_s is None or any(p.zero for p in run.plans)
        if run.dataset != _DATASET or given or devices > most_devices:
            continue
        assert run.measured_s is not None
        plan = found_step(run, run.plans[0].global_batch)
        (priced,) = score([run], constants)
        made.append(
            {
                "devices": devices,
                "hidden": run.spec.hidden,
                "found_s": plan.step_time,
                "published_s": run.measured_s,
                "found/published": plan.step_time / run.measured_s,
                "published plan priced": priced.prediction.step_s / run.measured_s,
            }
        )
    return tuple(made)


@click.command()
@click.option("--devices", default=8, show_default=True, help="The largest number of devices.")
def main(devices: int) -> None:
    """Prints the table."""
    Console(width=140).print(table("Alpa's GPTs inside a node", rows(devices)))


if __name__ == "__main__":
    main()
