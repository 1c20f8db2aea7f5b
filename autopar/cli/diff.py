"""``autopar diff``."""

from __future__ import annotations

import dataclasses

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import print_json, print_section
from autopar.plan import Plan
from autopar.report.diff import diff

_PLAN = click.Path(exists=True, dir_okay=False)


@click.command(cls=Command, name="diff")
@click.argument("before", metavar="a.json", type=_PLAN)
@click.argument("after", metavar="b.json", type=_PLAN)
@options.format_option("text", "json")
def command(before: str, after: str, form: str) -> None:
    """Compare two plans.

    Shows arguments with another sharding, step time, memory and communication. The exit code is 0 whether the plans
    differ or not.
    """
    difference = diff(Plan.load(before), Plan.load(after))
    if form == "json":
        print_json(dataclasses.asdict(difference))
        return
    if difference.identical:
        click.echo("the plans are equal")
        return
    for i, section in enumerate(difference.sections()):
        if i:
            click.echo()
        print_section(section)
