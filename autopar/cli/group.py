"""Commands, and the exit codes of errors: 1 and a message, 2 for wrong usage."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

import autopar
from autopar.errors import AutoparError
from autopar.errors.names import known_names

#: Commands with their line in ``autopar --help``; each is ``command`` of the module ``autopar.cli.NAME``.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "Plan a function for a cluster.",
        "annotate": "Plan a StableHLO module and write the plan into it.",
        "explain": "Say why a plan splits something as it does.",
        "diff": "Compare two plans.",
        "compare": "Rank search strategies on a function.",
        "report": "Show a plan, or two side by side, as a page.",
        "simulate": "Simulate a step of a plan.",
        "solve": "Solve a problem of the contest's format.",
        "run": "Run a script in several processes, and again when one ends.",
        "verify": "Compile a plan with the XLA compiler of its devices and compare.",
        "calibrate": "Measure the devices of this machine and write a cluster file.",
        "clusters": "List the clusters that come with autopar.",
        "schedules": "List pipeline schedules, or show one.",
        "strategies": "List the search strategies.",
        "cache": "Show or clear the plans that are kept on disk.",
    }
)

_DEBUG = "autopar.debug"


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    if value:
        ctx.meta[_DEBUG] = True
    return value


def debug_option() -> click.Option:
    """``--debug``, which the group and every command take."""
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=_remember_debug, help="Show tracebacks of errors."
    )


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"autopar {autopar.__version__}")
        ctx.exit()


def _version_option() -> click.Option:
    return click.Option(
        ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
        help="Show the version.",
    )  # fmt: skip


#: Arguments of `autopar.parallelize` that messages name, by the parameter of a command that has their value.
_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "batch": "batch_argnums",
        "donate": "donate_argnums",
        "memory_limit": "memory_limit",
        "mesh": "mesh_shape",
        "microbatches": "num_microbatches",
        "offload": "offload",
        "remat": "remat",
        "schedule": "schedule",
        "search": "search",
        "stages": "num_stages",
    }
)


def in_options(text: str, command: click.Command) -> str:
    """``text`` with options of a command in place of arguments of `autopar.parallelize`: --stages 8 for num_stages=8.

    Args:
        text: a message.
        command: what the user called; arguments that it has no option for stay.
    """
    flags = {_ARGUMENTS[p.name]: p.opts[0] for p in command.params if p.name in _ARGUMENTS}
    given = rf"""\b({"|".join(flags) or "(?!)"})=('[^']*'|"[^"]*"|\([\d, ]*\)|[1-9]\d*|auto)"""
    text = re.sub(given, lambda match: f"{flags[match[1]]} {_typed(match[2])}", text)
    # A name alone, where it is no word of a sentence.
    names = "|".join(name for name in flags if "_" in name)
    return re.sub(rf"\b({names or '(?!)'})\b(?!=)", lambda match: flags[match[1]], text)


def _typed(value: str) -> str:
    """A value as it is typed on a command line: ``2x4`` for ``(2, 4)``."""
    return "x".join(re.findall(r"\d+", value)) if value.startswith("(") else value.strip("'\"")


def fitted(message: str) -> str:
    """The message of an error in lines of the terminal's width; click writes ``Error: `` before the first."""
    from autopar.plan.columns import USUAL_COLUMNS, wrapped  # here: help needs no plans

    heading, lines = "Error: ", list[str]()
    width = shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns
    for line in (heading + message).splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        first, *rest = wrapped(line.strip(), width - len(indent) - 2)
        lines += [indent + first, *(f"{indent}  {part}" for part in rest)]
    return "\n".join(lines).removeprefix(heading)


class CommandFailed(click.ClickException):
    """A request that cannot be met: exit code 1 and the message of an `AutoparError`."""

    exit_code = 1

    def __init__(self, error: AutoparError, command: click.Command) -> None:
        kind, text = type(error).__name__, in_options(error.text(), command)
        super().__init__(text if kind == "AutoparError" else f"{kind}: {text}")


class Command(click.Command):
    """A command that takes ``--debug`` and shows no traceback of an `AutoparError` without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; click turns what is raised here into an exit code."""
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            if ctx.meta.get(_DEBUG):
                raise
            raise CommandFailed(error, self) from error


class LazyGroup(click.Group):
    """The commands of `COMMANDS`, each imported when it is used: the list of them is there without any."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [debug_option(), _version_option()]

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. On a terminal the message of an error keeps to its width."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if sys.stderr.isatty():
                text = fitted(error.format_message())
                error.format_message = lambda: text  # type: ignore[method-assign]
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"autopar.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with near names for one that is unknown."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}; {known_names(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
