"""``autopar cache``."""

from __future__ import annotations

import os

import click

from autopar.cli.group import Command
from autopar.errors.names import counted
from autopar.plan.text import bytes_text
from autopar.search.cache import VARIABLE, plan_cache


@click.command(cls=Command, name="cache")
@click.option("--clear", is_flag=True, help="Remove all of them.")
def command(clear: bool) -> None:
    """Show or clear the plans that are kept on disk."""
    cache = plan_cache(os.environ)
    if cache is None:
        click.echo(f"no plans are kept: {VARIABLE} turns it off")
    elif clear:
        click.echo(f"{cache.folder}: {cache.clear()} files removed")
    else:
        sizes = cache.sizes()
        click.echo(
            f"{cache.folder}: {counted(len(sizes), 'plan')}, {bytes_text(sum(sizes))} of {bytes_text(cache.most_bytes)}"
        )
