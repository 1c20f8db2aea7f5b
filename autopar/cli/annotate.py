"""``autopar annotate``."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.options import mesh_sizes
from autopar.cli.output import check_folder, progress, write_file
from autopar.cli.plan import chosen_cluster
from autopar.cluster import Cluster

#: Devices up to which ``--compile`` makes virtual ones of the processor.
_MOST_COMPILED = 64


@click.command(cls=Command, name="annotate")
@click.argument("module", metavar="MODEL.mlir", type=click.Path(exists=True, dir_okay=False))
@options.cluster_options
@options.search_option
@options.batch_option
@click.option("--memory-limit", metavar="SIZE", help="Memory a device, as 40GB.  [default: that of the device]")
@click.option("--mesh", metavar="SIZES", callback=mesh_sizes, help="The only logical mesh, as 2x4.")
@click.option("--plan", "plan_file", metavar="plan.json", help="Write the plan to a file, too.")
@click.option("--compile", "compiled", is_flag=True, help="Compile for virtual CPU devices and compare collectives.")
@click.option("-o", "--output", metavar="FILE", help="Write the module to FILE.  [default: standard output]")
@options.quiet_option
def command(
    module: str,
    cluster_name: str | None,
    nodes: int | None,
    plan_file: str | None,
    compiled: bool,
    output: str | None,
    quiet: bool,
    **asked: Any,
) -> None:
    """Plan a StableHLO module and write the plan into it.

    MODEL.mlir is a module of any frontend (jax.export, PyTorch), as text, bytecode or a portable artifact. Its function
    main is planned as one stage; what is written has Shardy's annotations, which XLA partitions by.
    """
    for name in (output, plan_file):
        check_folder(name)
    cluster = chosen_cluster(cluster_name, nodes)
    if cluster is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if compiled and cluster.num_devices <= _MOST_COMPILED:
            os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(cluster.num_devices))
    with progress(quiet) as say:
        say("loading jax")
        annotating = import_module("autopar.api.annotate")
        say(f"reading {module}")
        annotated = annotating.annotate(
            Path(module),
            cluster=cluster or Cluster.local(),
            batch=asked["batch"],
            search=asked["search"] or "alpa",
            memory_limit=asked["memory_limit"],
            mesh=asked["mesh"],
            progress=say,
        )
        if compiled:
            say("compiling")
            verification = annotating.compile_annotated(annotated)
    if plan_file is not None:
        write_file(plan_file, annotated.plan.to_json())
    if output is None:
        click.echo(annotated.text, nl=False)
    else:
        write_file(output, annotated.text)
    shown = str(verification) if compiled else str(annotated.plan) if output is not None else ""
    click.echo(shown, err=output is None)
