"""``autopar simulate``."""

from __future__ import annotations

import click

from autopar.cli.group import Command
from autopar.cli.options import trace_or_picture
from autopar.cli.output import check_folder, on_terminal, write_file
from autopar.plan import Plan
from autopar.simulate import simulate


@click.command(cls=Command, name="simulate")
@click.argument("plan_file", metavar="plan.json", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    callback=trace_or_picture,
    help="Write a Chrome trace; a picture if FILE ends in .svg.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "svg"]), default="text", show_default=True,
    help="What is printed.",
)  # fmt: skip
@click.option("--depth", type=click.IntRange(min=1), help="Values between two workers that were not yet received.")
def command(plan_file: str, output: str | None, form: str, depth: int | None) -> None:
    """Simulate a step of a plan.

    Prints who computes which microbatch when, the step time, the bubble and the peak memory. The trace that -o writes
    opens in Perfetto (ui.perfetto.dev).
    """
    check_folder(output)
    timeline = simulate(Plan.load(plan_file), depth)
    if output is not None:
        write_file(output, timeline.to_svg() if output.endswith(".svg") else timeline.to_chrome())
    text = {"text": lambda: on_terminal(timeline), "json": timeline.to_json, "svg": timeline.to_svg}[form]()
    click.echo(text, nl=False)
