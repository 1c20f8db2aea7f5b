"""``autopar plan``."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import PAGES, check_folder, progress, terminal_console, write_file
from autopar.cli.target import load, parse_target, user_code
from autopar.cluster import Cluster
from autopar.cluster.catalog import find as find_cluster
from autopar.errors import ClusterError
from autopar.plan import Plan


@click.command(cls=Command, name="plan")
@click.argument("target", metavar="FILE.py:FUNC")
@options.target_options
@options.cluster_options
@options.search_option
@options.degree_options
@options.pipeline_options
@options.precision_options
@options.limit_options
@options.time_option
@options.batch_option
@click.option(
    "--alternatives/--no-alternatives",
    default=None,
    help="Plan the alternatives that people write by hand too.  [default: for text and pages, not for JSON]",
)
@click.option(
    "--verify", metavar="T", help="Let the compiler of T choose among plans: cpu, tpu:v5p:4x4x4, cuda:h100:8x8, ..."
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan to FILE: a page if it ends in .html, else JSON.")
@options.format_option("text", "json", "html")
@options.quiet_option
def command(
    target: str,
    arguments: str,
    preset: str | None,
    set_: dict[str, Any],
    cluster_name: str | None,
    nodes: int | None,
    output: str | None,
    form: str,
    quiet: bool,
    **asked: Any,
) -> None:
    """Plan a function for a cluster.

    FUNC is an ordinary jax function in FILE.py, or a decorated one; module:func works too. Its arguments come from
    --args. A module with build(preset, *, abstract, ...) needs no FUNC. Nothing is run, and the cluster need not
    be there. --tp, --pp, --dp, --cp, --ep, --zero and --chunks price the plan that they name.
    """
    wanted = parse_target(target)
    alternatives = asked.pop("alternatives")
    cluster = chosen_cluster(cluster_name, nodes)
    check_folder(output)
    if cluster is not None or asked["verify"] is not None:
        # Tracing needs no device of the cluster; jax reads this when it is imported.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with progress(quiet) as say, user_code(wanted):
        say("loading jax")
        planning = import_module("autopar.cli.planning")
        request = planning.PlanRequest(arguments, preset, set_, cluster, **asked)
        say(f"loading {wanted.place}")
        function, values = planning.function_and_arguments(load(wanted), wanted, request)
        plan = planning.make_plan(function, values, request, say)
        kept = plan.with_alternatives() if alternatives else replace(plan, again=None)
        page = form == "html" or (output or "").endswith(PAGES)
        wanted_later = alternatives is None and (form == "text" or page)
        shown = plan.shown if wanted_later else kept
    show(shown, kept, form, output)


def chosen_cluster(name: str | None, nodes: int | None) -> Cluster | None:
    """The cluster of the options; None for the devices of this process.

    Raises:
        click.UsageError: there is no such name or file, or nodes were given without a cluster.
        ClusterError: the file is wrong.
    """
    if name is None:
        if nodes is not None:
            raise click.UsageError("--nodes needs --cluster")
        return None
    try:
        find_cluster(name)
    except ClusterError as error:
        raise click.BadParameter(f"{error.fact}; {error.remedy}", param_hint="--cluster") from error
    return Cluster.load(name, nodes)


def show(plan: Plan, kept: Plan, form: str, output: str | None) -> None:
    """Writes the plan to ``output`` and prints it in the form that was asked for.

    A page that goes to a file is not printed as well.

    Args:
        plan: the plan that text and pages show, with alternatives where they were planned.
        kept: the plan that JSON holds.
        form: "text", "json" or "html".
        output: a file, or None.
    """
    page_file = output is not None and output.endswith(PAGES)
    page = import_module("autopar.report.page").plan_page(plan) if page_file or form == "html" else ""
    if output is not None:
        write_file(output, page if page_file else kept.to_json())
    if form == "json":
        click.echo(kept.to_json(), nl=False)
    elif form == "html":
        if not page_file:
            click.echo(page, nl=False)
    elif (console := terminal_console()) is not None:
        import_module("autopar.report.terminal").print_plan(plan, console)
    else:
        click.echo(str(plan))
