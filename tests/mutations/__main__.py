"""``python -m tests.mutations [TEXT ...]``: faults whose names contain a TEXT, or all; exits with 1 on a miss.

Drawn faults whose text is no longer in the code, or that no test is known to catch, are named and left out.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tests.mutations.run import DRAWN, Fault, caught, faults, fits


@click.command()
@click.argument("texts", nargs=-1)
@click.option("--processes", default=2, help="Faults that are tried at the same time.")
def main(texts: tuple[str, ...], processes: int) -> None:
    """Says for each fault which test fails."""
    drawn = faults(DRAWN)
    for gone in (f for f in drawn if not fits(f)):
        click.echo(f"gone    {gone.name}")
    for known in (f for f in drawn if fits(f) and not f.tests):
        click.echo(f"no test {known.name}")
    every = (*faults(), *(f for f in drawn if fits(f) and f.tests))
    chosen = [f for f in every if not texts or any(t in f.name for t in texts)]
    with ThreadPoolExecutor(processes) as pool:
        answers = list(pool.map(_tried, chosen))
    missed = [f.name for f, by in zip(chosen, answers, strict=True) if not by]
    click.echo(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    sys.exit(1 if missed else 0)


def _tried(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as folder:
        by = caught(fault, Path(folder))
    click.echo(f"{'caught' if by else 'MISSED'}  {fault.name}  {by}")
    return by


if __name__ == "__main__":
    main()
