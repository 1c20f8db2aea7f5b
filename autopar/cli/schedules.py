"""``autopar schedules``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

from autopar.cli.group import Command
from autopar.cli.options import SECONDS
from autopar.cli.output import check_folder, on_terminal, print_json, print_section, write_file
from autopar.errors import AutoparError, ScheduleError
from autopar.plan.columns import columns
from autopar.report.sections import Section
from autopar.schedule import (
    Table,
    build,
    chain,
    check_table,
    factory_named,
    get,
    parse_table,
    schedules,
    table_of,
    to_csv,
    to_json,
    to_text,
)
from autopar.simulate import Timeline, equal_stages, run


@click.command(cls=Command, name="schedules")
@click.argument("name", metavar="[NAME|FILE]", required=False)
@click.option("--stages", type=click.IntRange(min=1), help="Stages of the model.  [default: 4 workers]")
@click.option("--microbatches", type=click.IntRange(min=1), default=8, show_default=True, help="Parts of the batch.")
@click.option("--forward", type=SECONDS, default=1.0, show_default=True, help="Seconds of a forward pass.")
@click.option("--backward", type=SECONDS, help="Seconds of a backward pass.  [default: 2, or 1 where it is split]")
@click.option("--weight", type=SECONDS, default=1.0, show_default=True, help="Seconds of a weight gradient.")
@click.option("--transfer", type=SECONDS, default=0.0, show_default=True, help="Seconds of every transfer.")
@click.option(
    "--format", "form", type=click.Choice(["text", "csv", "json", "svg"]), default="text", show_default=True,
    help="What is printed.",
)  # fmt: skip
@click.option("-o", "--output", metavar="FILE", help="Write a Chrome trace; a picture if FILE ends in .svg.")
def command(
    name: str | None,
    stages: int | None,
    microbatches: int,
    forward: float,
    backward: float | None,
    weight: float,
    transfer: float,
    form: str,
    output: str | None,
) -> None:
    """List pipeline schedules, or show one.

    With the NAME of a schedule its table is shown, and how long a step takes on equal stages. With a FILE that holds a
    table (text, CSV or JSON) the table is checked first.
    """
    if name is None:
        _list(form)
        return
    check_folder(output)
    table = _table(name, stages, microbatches)
    dataflow = chain(table)
    program = build(table, dataflow)
    whole = backward if backward is not None else (1.0 if table.splits_backward else 2.0)
    seconds = equal_stages(table, dataflow, {"forward": forward, "backward": whole, "weight": weight}, transfer)
    timeline = run(program, seconds)
    if output is not None:
        write_file(output, timeline.to_svg() if output.endswith(".svg") else timeline.to_chrome())
    click.echo(_shown(table, timeline, form), nl=False)


def _list(form: str) -> None:
    rows = tuple((name, _first_line(name)) for name in schedules())
    if form == "json":
        print_json([{"name": name, "description": text} for name, text in rows])
        return
    print_section(Section("schedules", ("name", "description"), rows))


def _first_line(name: str) -> str:
    try:
        return (inspect.getdoc(factory_named(name)) or "").partition("\n")[0]
    except Exception as error:  # another package's code: the list of the others is still wanted
        return f"cannot be loaded: {type(error).__name__}: {error}"


def _table(name: str, stages: int | None, microbatches: int) -> Table:
    path = Path(name)
    if not path.is_file():
        try:
            factory_named(name)
        except ScheduleError as error:
            raise click.BadParameter(f"{error.fact}; {error.remedy}", param_hint="NAME") from error
        schedule = get(name)
        return table_of(schedule, 4 * schedule.chunks if stages is None else stages, microbatches)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AutoparError(f"cannot read {name}: {error}") from error
    return check_table(parse_table(text))


def _shown(table: Table, timeline: Timeline, form: str) -> str:
    if form == "csv":
        return to_csv(table)
    if form == "json":
        return to_json(table)
    if form == "svg":
        return timeline.to_svg()
    return f"{_in_blocks(to_text(table))}\n{on_terminal(timeline)}"


def _in_blocks(table: str) -> str:
    """A table on a terminal: rows that are too wide go on in further blocks. A file gets the rows whole, to be read."""
    lines = table.splitlines()
    if not sys.stdout.isatty() or max(map(len, lines)) <= columns():
        return table
    rows = [line for line in lines if "|" in line]
    label = rows[0].index("|") + 2
    cell = max(len(task) for row in rows for task in row[label:].split()) + 1
    wide = max(cell, (columns() - label) // cell * cell)
    longest = max(map(len, rows))
    starts = range(label, longest, wide)
    blocks = ["\n".join(f"{row[:label]}{row[start : start + wide].rstrip()}" for row in rows) for start in starts]
    return "\n".join([*(line for line in lines if "|" not in line), "\n\n".join(blocks)]) + "\n"
