"""``autopar report``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from autopar.cli.group import Command
from autopar.cli.output import PAGES, check_folder, write_file
from autopar.plan import Plan
from autopar.report.dot import plan_dot

_GRAPHS = (".dot", ".gv")
_PLAN = click.Path(exists=True, dir_okay=False)


@click.command(cls=Command, name="report")
@click.argument("plan_file", metavar="plan.json", type=_PLAN)
@click.argument("other_file", metavar="[other.json]", type=_PLAN, required=False)
@click.option("-o", "--output", metavar="FILE", help="Write to FILE instead of standard output.")
@click.option(
    "--format", "form", type=click.Choice(["html", "dot"]), help="A page, or a graph for Graphviz.  [default: html]"
)
def command(plan_file: str, other_file: str | None, output: str | None, form: str | None) -> None:
    """Show a plan, or two side by side, as a page.

    The page is one file that needs no network: the timeline of the pipeline, the stages on the cluster, memory by kind
    against the limit, the sharding of each layer, communication by link, what was considered and why this was chosen.
    Texts of the user's lines are there where the file lies in the current folder or next to the plan.
    """
    check_folder(output)
    if form is None and output is not None and Path(output).suffix.lower() not in ("", *PAGES, *_GRAPHS):
        raise click.BadParameter(f"{output!r} is neither a page (.html) nor a graph (.dot)", param_hint="-o")
    plan = Plan.load(plan_file)
    if form == "dot" or (form is None and output is not None and output.endswith(_GRAPHS)):
        if other_file is not None:
            raise click.UsageError("a graph is of one plan")
        text = plan_dot(plan)
    else:
        page = import_module("autopar.report.page")
        text = (
            page.plan_page(plan, (Path.cwd(), Path(plan_file).parent))
            if other_file is None
            else page.pair_page(plan, Plan.load(other_file), (plan_file, other_file))
        )
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)
