"""``autopar strategies``."""

from __future__ import annotations

import inspect

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import print_json, print_section
from autopar.report.sections import Section
from autopar.search import strategies, strategy_named


@click.command(cls=Command, name="strategies")
@options.format_option("text", "json")
def command(form: str) -> None:
    """List the search strategies.

    A name goes to --search, or to search= of autopar.parallelize.
    """
    rows = tuple((name, first_line(name)) for name in strategies())
    if form == "json":
        print_json([{"name": name, "description": text} for name, text in rows])
        return
    print_section(Section("strategies", ("name", "description"), rows))


def first_line(name: str) -> str:
    """The first line of a strategy's docstring; the reason where its package cannot be imported."""
    try:
        strategy = strategy_named(name)
    except Exception as error:  # another package's code: the list of the others is still wanted
        return f"cannot be loaded: {type(error).__name__}: {error}"
    return (inspect.getdoc(strategy) or "").partition("\n")[0]
