"""``autopar run``."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from autopar.cli.group import Command


@click.command(cls=Command, name="run", context_settings={"ignore_unknown_options": True})
@click.option("--processes", type=click.IntRange(min=1), required=True, metavar="N", help="Processes to start.")
@click.option(
    "--least",
    type=click.IntRange(min=1),
    metavar="M",
    help="Start again with one process less after each loss, down to M; what runs is planned again.  [default: N]",
)
@click.option(
    "--restarts", type=click.IntRange(min=0), default=3, show_default=True, metavar="R", help="Starts again at most."
)
@click.option(
    "--heartbeat",
    type=click.FloatRange(min=0.5),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of silence after which a process is taken for lost.",
)
@click.option("--cpu-devices", type=click.IntRange(min=1), metavar="K", help="Virtual CPU devices of each process.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    processes: int,
    least: int | None,
    restarts: int,
    heartbeat: float,
    cpu_devices: int | None,
    script: tuple[str, ...],
) -> None:
    """Run a script in several processes, and again when one ends.

    All processes run on this machine, and all begin again when one of them ends.
    The script calls autopar.initialize() first, step.restore where there is a checkpoint, and step.save now and then.
    SIGTERM goes on to all processes. A script that exits with code 75 saved and is started again.
    """
    hosts = import_module("autopar.runtime.hosts.supervise")
    job = hosts.SupervisedJob(script, processes, min(least or processes, processes), restarts, heartbeat, cpu_devices)
    sys.exit(hosts.supervise(job, lambda text: click.echo(f"autopar run: {text}", err=True)))
