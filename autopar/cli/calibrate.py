"""``autopar calibrate``."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import check_folder, progress, stdout_to_stderr, write_file

#: What ``--ray`` is without an address.
_HERE = "here"


@click.command(cls=Command, name="calibrate")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Cluster file to write, as mine.toml.  [default: kept for this machine, where Cluster.local() reads it]",
)
@click.option(
    "--cpu-devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure N virtual CPU devices of this machine, or of each worker.",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value=_HERE,
    metavar="[ADDRESS]",
    help="Measure workers on Ray and the links between them: on a running cluster (`auto`: that of this machine), or "
    "without ADDRESS on RAY_ADDRESS or a Ray that is started here.",
)
@click.option("--workers", type=click.IntRange(min=2), metavar="N", help="Workers on Ray.  [default: as Cluster.ray()]")
@click.option("--name", metavar="NAME", help="Name of the cluster.  [default: that of the file]")
@click.option("--quick", is_flag=True, help="Few sizes and repetitions: a minute or so, not several, and rough.")
@options.quiet_option
def command(
    output: str | None,
    cpu_devices: int | None,
    ray: str | None,
    workers: int | None,
    name: str | None,
    quick: bool,
    quiet: bool,
) -> None:
    """Measure the devices of this machine and write a cluster file.

    Matrix products, memory, what starting an operator costs, and collectives are timed on all devices of this process
    at once, collectives in groups of several sizes; with --ray on one worker of each kind, and transfers between
    workers besides. The file holds what was fitted, with the date and the spread; plan with --cluster FILE. Without -o
    this machine keeps it, and plans for its devices use it.
    """
    if output is None and ray is not None:
        raise click.UsageError("--ray needs -o: this machine keeps figures of its own devices alone")
    check_folder(output)
    if output is not None and not output.endswith(".toml"):
        raise click.BadParameter("cluster files end in .toml", param_hint="-o")
    if workers is not None and ray is None:
        raise click.UsageError("--workers is for --ray")
    if cpu_devices is not None and ray is None:
        # jax reads both when it is imported.
        os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"] = "cpu", str(cpu_devices)
    with progress(quiet) as say, stdout_to_stderr():
        say("loading jax")
        effort = import_module("autopar.runtime.measuring").QUICK if quick else None
        calibrate = import_module("autopar.api.calibrate").calibrate
        name = name or ("here" if output is None else Path(output).stem)
        if ray is None:
            calibrated = calibrate(name, effort=effort, keep=output is None, progress=say)
        else:
            say("connecting to Ray")
            connect = import_module("autopar.cluster").Cluster.ray
            kind = "auto" if cpu_devices is None else "cpu"
            address = None if ray == _HERE else ray
            with connect(address, workers=workers, devices_per_worker=cpu_devices, devices=kind) as cluster:
                calibrated = calibrate(name, cluster=cluster, effort=effort, progress=say)
    if output is not None:
        write_file(output, calibrated.text)
    click.echo(calibrated.text, nl=False)
