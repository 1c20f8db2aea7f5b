"""``autopar solve``."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import click

from autopar.cli import options
from autopar.cli.group import Command
from autopar.cli.output import check_folder, print_json, print_section, progress, write_file
from autopar.errors.names import known_names
from autopar.report.sections import Section
from autopar.solver import Solution, SolverError, Status, read_contest, solve, solver_named, solvers

_END_S = 0.5  # of a time limit, for printing and the interpreter's end,
_LIMIT_PART = 0.01  # of the limit for what a busy machine takes longer, and
_END_PART = 0.5  # of the seconds that its start took, which tell how busy the machine is
_START_S = 0.5  # where that is not known
_MOST_START_S = 10.0  # a process that is older did other things before


@click.command(cls=Command, name="solve")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=options.SECONDS,
    metavar="S",
    help="Seconds in all, reading included.  [default: until the solver ends of itself]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random numbers.")
@click.option(
    "--solver",
    default="lagrange",
    show_default=True,
    metavar="NAME",
    help="Solver: lagrange, highs, exhaustive.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the choice to FILE, as JSON.")
@options.format_option("text", "json")
@options.quiet_option
def command(
    file: Path, time_limit_s: float | None, seed: int, solver: str, output: str | None, form: str, quiet: bool
) -> None:
    """Solve a problem of the contest's format.

    FILE is a problem in the format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, plain or
    compressed by gzip: a strategy for each node, at the least cost, under a limit on memory over time. Prints the
    cost, a lower bound, the gap between them and seconds by phase. Exit code 1 where no choice was found that obeys
    the limit.
    """
    began, started_s = time.monotonic(), _age_s()
    check_folder(output)
    if solver not in solvers():
        raise click.BadParameter(
            f"no solver is called {solver!r}; {known_names(solver, solvers())}", param_hint="--solver"
        )
    with progress(quiet) as say:
        say(f"reading {file}")
        problem = read_contest(file)
        read_s = time.monotonic() - began
        say(f"solving {len(problem.nodes):,} nodes, {len(problem.edges):,} edges")
        engine = solver_named(solver)  # may take seconds to load
        spent_s = started_s * (1 + _END_PART) + _END_S + (time.monotonic() - began)
        left = None if time_limit_s is None else time_limit_s * (1 - _LIMIT_PART) - spent_s
        answer = solve(problem, engine, time_limit_s=None if left is None else max(0.0, left), seed=seed)
    phases = (("read", read_s), *(answer.phases or (("solve", answer.seconds),)))
    data = _data(answer, phases, seed)
    if output is not None:
        write_file(output, json.dumps({**data, "solution": list(answer.choice)}) + "\n")
    if form == "json":
        print_json(data)
    else:
        print_section(_section(file.name, data))
    if not answer.choice and problem.nodes:
        raise SolverError(f"no choice was found within the limits: {answer.status.value}")


def _age_s() -> float:
    """Seconds that this process has lived, where the system tells; else a guess."""
    try:
        since_boot = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        # The name, in parentheses, may hold spaces; the 20th field after it is the start in ticks since boot.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age_s = since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _START_S
    return max(0.0, age_s) if age_s < _MOST_START_S else _START_S


def _data(answer: Solution, phases: tuple[tuple[str, float], ...], seed: int) -> dict[str, Any]:
    return {
        "status": answer.status.name.lower(),
        "cost": _number(answer.objective),
        "bound": _number(answer.lower_bound),
        "gap": _number(answer.gap),
        "solver": answer.solver,
        "seed": seed,
        "seconds": {name: round(seconds, 3) for name, seconds in phases},
    }


def _number(value: float) -> float | None:
    """For JSON: None where not finite, whole numbers without a fraction."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def _section(title: str, data: dict[str, Any]) -> Section:
    seconds: dict[str, float] = data["seconds"]
    rows = [
        ("status", Status[data["status"].upper()].value),
        ("cost", _text(data["cost"])),
        ("bound", _text(data["bound"])),
        ("gap", "unknown" if data["gap"] is None else f"{data['gap']:.4%}"),
        ("solver", data["solver"]),
        *((name, f"{value:.2f} s") for name, value in seconds.items()),
    ]
    return Section(title, ("figure", "value"), tuple(rows))


def _text(value: float | None) -> str:
    return "none" if value is None else str(value)
