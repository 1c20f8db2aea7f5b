"""Output of the commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar._compat.files import write_whole
from autopar._compat.reminders import ACTIVITY, AFTER_S, reminders
from autopar.errors import AutoparError
from autopar.plan.columns import columns
from autopar.report.sections import Section

if TYPE_CHECKING:
    from autopar.simulate import Timeline


def terminal_console() -> Any:
    """A rich console on standard output, or None where that is no terminal."""
    # rich is imported only where it draws something: it takes a third of the start of a command.
    return import_module("rich.console").Console() if sys.stdout.isatty() else None


def print_section(section: Section) -> None:
    """Prints a table: drawn by rich on a terminal, plain aligned text elsewhere."""
    console = terminal_console()
    if console is None:
        click.echo(section.text())
    else:
        import_module("autopar.report.terminal").print_section(section, console)


def on_terminal(timeline: Timeline) -> str:
    """A timeline in characters, as wide as the terminal: its lines have the number of the worker and two bars."""
    return timeline.to_text(columns() - len(str(timeline.num_workers - 1)) - len(" ││"))


def print_json(data: Any) -> None:
    """Prints plain data as one JSON document."""
    click.echo(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))


#: Endings of files that hold a page.
PAGES = (".html", ".htm")


def check_folder(path: str | None) -> None:
    """Raises click.BadParameter where ``-o`` is a folder, or lies in one that is not there; None is no file."""
    if path is None:
        return
    if Path(path).is_dir():
        raise click.BadParameter(f"{path!r} is a folder, not a file", param_hint="-o")
    if not Path(path).absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(Path(path).parent)!r}", param_hint="-o")


def write_file(path: str, text: str) -> None:
    """Writes a result to a file, whole or not at all. AutoparError where the system does not let it."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise AutoparError(f"cannot write {path}: {error.strerror or error}") from error


# Numbers of operators, by which the forms of a step differ.
_COUNTS = re.compile(r"\b\d+(?= operators\b)")


@dataclass(frozen=True)
class _Phase:
    """A phase, as a spinner draws it each time: what the process does in it, if that has a name of its own."""

    text: str

    def __rich__(self) -> Any:
        # Text, not str: what is in brackets is no markup.
        return import_module("rich.text").Text(ACTIVITY.or_phase(self.text))


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that says on standard error what is being done: a spinner on a terminal, else a line each time, and
    again with the seconds so far where nothing new was said for long.

    Args:
        quiet: say nothing.
    """
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        console = import_module("rich.console").Console(stderr=True)
        with console.status("") as status:
            yield lambda text: status.update(_Phase(text))
    else:
        # By the line without its counts: forms of a step that are planned in the same way are one line.
        said: dict[str, str] = {}

        def say(text: str) -> None:
            if (line := _COUNTS.sub("", text)) not in said:
                said[line] = text
                click.echo(text, err=True)

        def remind(passed_s: float) -> None:
            if said:
                text = ACTIVITY.or_phase(next(reversed(said.values())))
                click.echo(f"{text} ({passed_s:.0f} s so far)", err=True)

        with reminders(remind, AFTER_S):
            yield say


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends to standard error what is written to standard output, by libraries below Python too."""
    sys.stdout.flush()
    try:
        is_process_output = sys.stdout.fileno() == 1
    except (OSError, ValueError):  # replaced by a buffer, as in tests
        is_process_output = False
    with contextlib.redirect_stdout(sys.stderr):
        if not is_process_output:
            yield
            return
        kept = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
