"""``python -m benchmarks [NAME ...] [--json FILE] [--quick]``: tables go to standard output, progress to stderr.

``reference`` prints the CPU seconds of a fixed piece of work; what other benchmarks measured is also shown as multiples
of it.

``contest`` takes ``--data DIR`` and ``--instances A,B``, ``verified`` takes ``--targets A,B`` and ``--examples A,B``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import click
import jax
from rich.console import Console

from benchmarks import (
    batches,
    calibrated,
    contest,
    dispatch,
    drawn,
    first_calls,
    growth,
    hosts,
    kills,
    large,
    llama3,
    many_hosts,
    many_tables,
    megatron,
    memory_limit,
    newcomers,
    one_program,
    overhead,
    pipelines,
    planning,
    predicted,
    ray_step,
    reference,
    sanity,
    schedules,
    soak,
    soak_hosts,
    spatial,
    thresholds,
    verified,
    work,
)
from benchmarks.clusters import DEVICES
from benchmarks.experts import cases as experts
from benchmarks.machine import facts
from benchmarks.published import table as published
from benchmarks.report import Report, Say, table
from benchmarks.search import bench as search
from benchmarks.stale import bench as stale

BENCHMARKS: Mapping[str, Callable[[bool, Say], Report]] = MappingProxyType(
    {
        "batches": batches.run,
        "calibrated": calibrated.run,
        "contest": contest.run,
        "dispatch": dispatch.run,
        "drawn": drawn.run,
        "experts": experts.run,
        "first_calls": first_calls.run,
        "growth": growth.run,
        "hosts": hosts.run,
        "kills": kills.run,
        "large": large.run,
        "llama3": llama3.run,
        "many_hosts": many_hosts.run,
        "many_tables": many_tables.run,
        "megatron": megatron.run,
        "predicted": predicted.run,
        "memory_limit": memory_limit.run,
        "newcomers": newcomers.run,
        "one_program": one_program.run,
        "overhead": overhead.run,
        "pipelines": pipelines.run,
        "planning": planning.run,
        "published": published.run,
        "ray_step": ray_step.run,
        "reference": reference.run,
        "sanity": sanity.run,
        "schedules": schedules.run_all,
        "search": search.run,
        "soak": soak.run,
        "soak_hosts": soak_hosts.run,
        "spatial": spatial.run,
        "stale": stale.run,
        "thresholds": thresholds.run,
        "verified": verified.run,
        "work": work.run,
    }
)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(BENCHMARKS)))
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results there.")
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that it works.")
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the contest's instances."
)
@click.option("--instances", default="", metavar="A,B", help="Letters of instances of the contest; all unless given.")
@click.option(
    "--seed", default=0, help="Of the contest's solver, of what `drawn` and `batches` draw, and the first of `stale`."
)
@click.option("--cases", default=drawn.CASES, help="How many problems `drawn` draws, and batch sizes `batches`.")
@click.option("--cluster", type=click.Path(exists=True, path_type=Path), help="Cluster file that `spatial` plans for.")
@click.option("--first", default=0, help="Number of the first of them.")
@click.option("--compare/--no-compare", default=True, help="Whether `drawn` plans what is asked for by name too.")
@click.option("--cpu-limit-s", default=drawn.CPU_LIMIT_S, help="CPU seconds after which `drawn` gives a plan up.")
@click.option("--targets", default="", metavar="A,B", help="What `verified` compiles for; see benchmarks/verified.py.")
@click.option("--examples", default="", metavar="A,B", help="What `verified` compiles; all examples unless given.")
@click.option("--minutes", default=soak.MINUTES, help="How long `soak` kills workers, and `soak_hosts` trains.")
@click.option(
    "--pause-s", default=0.0, help="Seconds between two steps of `soak` and `soak_hosts`, next to other work."
)
@click.option("--kills", "count", default=kills.KILLS, help="How many processes `kills` kills.")
def main(
    names: tuple[str, ...],
    file: Path | None,
    quick: bool,
    data: Path | None,
    instances: str,
    seed: int,
    cases: int,
    cluster: Path | None,
    first: int,
    compare: bool,
    cpu_limit_s: float,
    targets: str,
    examples: str,
    minutes: float,
    pause_s: float,
    count: int,
) -> None:
    """Runs benchmarks (all of them unless NAMES are given); exits with 1 if a target is missed."""
    os.environ["AUTOPAR_CACHE_DIR"] = "off"  # planning is measured, not reading; processes of the benchmarks inherit it
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    letters = instances.replace(",", "")
    chosen = {"targets": _listed(targets), "examples": _listed(examples)}
    runs = {
        **BENCHMARKS,
        "batches": partial(batches.run, seed=seed, batches=cases),
        "contest": partial(contest.run, data=data, letters=letters, seed=seed),
        "kills": partial(kills.run, kills=count),
        "drawn": partial(
            drawn.run, seed=seed, cases=cases, first=first, compare=compare, limit_s=cpu_limit_s, file=file
        ),
        "many_tables": partial(many_tables.run, seed=seed, cases=cases),
        "sanity": partial(sanity.run, seed=seed, cases=cases),
        "soak": partial(soak.run, minutes=minutes, pause_s=pause_s),
        "soak_hosts": partial(soak_hosts.run, minutes=minutes, pause_s=pause_s),
        "spatial": partial(spatial.run, seed=seed, count=cases, file=cluster, first=first),
        "stale": partial(stale.run, seed=seed),
        "thresholds": partial(thresholds.run, seed=seed, first=first, cases=cases),
        "verified": partial(verified.run, **chosen),
    }
    reports = []
    reference_s = 0.0  # measured where it is wanted
    for name in names or tuple(BENCHMARKS):
        report = runs[name](quick, lambda line: click.echo(line, err=True))
        reports.append(report)
        if report.measured and not reference_s:
            reference_s = reference.seconds()
            console.print(f"reference: {reference_s:.3f} CPU s")
        for title, rows in (*report.details, (report.name, report.rows)):
            console.print(table(title, rows, report.measured, reference_s))
        console.print(f"target: {report.target}: {'met' if report.passed else 'MISSED'}")
        for note in report.notes:
            console.print(note)
    if file is not None:
        written = {"machine": facts(), "quick": quick, "reports": [r.to_dict() for r in reports]}
        written |= {"reference_cpu_s": reference_s} if reference_s else {}
        file.write_text(json.dumps(written, indent=1, default=float) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(r.passed for r in reports) else 1)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


if __name__ == "__main__":
    main()
