"""``autopar explain``."""

from __future__ import annotations

import click

from autopar.cli.group import Command
from autopar.plan import Plan


@click.command(cls=Command, name="explain")
@click.argument("plan_file", metavar="plan.json", type=click.Path(exists=True, dir_okay=False))
@click.argument("what", required=False)
def command(plan_file: str, what: str | None) -> None:
    """Say why a plan splits something as it does.

    WHAT is an operator or an argument path, or a part of one; without it the most expensive choices are shown. Each
    comes with its cost, the runner-up and what that would cost.
    """
    click.echo(Plan.load(plan_file).explain(what))
