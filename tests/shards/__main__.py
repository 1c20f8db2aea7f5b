"""``python -m tests.shards [K]``: one part of the slow tests within a time, in an order that the commit draws.

Without K it is the part of the commit's hash. Tests that have not ended within the time count neither way; another
commit draws another order, so that each test comes up. Exits with 1 where a test fails; with ``--report`` only where
one fails that is known to pass (`tests.shards.parts.recorded`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import click

from tests.shards.parts import PARTS, ROOT, Part, Unit, chosen, record, recorded, units

_NO_TESTS = 5  # pytest's exit code where none was collected
_GRACE_S = 30.0  # after an interrupt, for fixtures that end what they started


def commit() -> str:
    """Hash of the commit that is checked out; "0" where there is none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


@click.command()
@click.argument("number", required=False, type=click.IntRange(1, len(PARTS)))
@click.option("--minutes", default=20.0, help="Of wall time; what runs then is ended.")
@click.option("--processes", default=2, help="Files that are tried at the same time.")
@click.option("--seed", default="", help="Of the order; the commit's hash unless given.")
@click.option("--report", is_flag=True, help="Failures of tests that no run has recorded as passed are told alone.")
@click.option("--record", "keep", is_flag=True, help="Keeps which tests passed, and their CPU seconds.")
def main(number: int | None, minutes: float, processes: int, seed: str, report: bool, keep: bool) -> None:
    """Runs part NUMBER."""
    drawn_by = seed or commit()
    number = number or chosen(commit())
    part = PARTS[number - 1]
    click.echo(f"shard {number} of {len(PARTS)}: {part.name}, {minutes:g} minutes at most, order of {drawn_by[:12]}")
    try:
        python = _python(part, 60 * minutes)
    except subprocess.SubprocessError as error:
        click.echo(f"{part.environment} cannot be made: {error}")
        _end_run(number, part, good=False, code=0 if report else 1)
    tests = list(units(part))
    random.Random(drawn_by).shuffle(tests)
    seconds_from_now = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        results = Path(folder) / "results.jsonl"
        randomly = str(random.Random(drawn_by).randrange(2**31))
        ended = list(pool.map(lambda unit: run(python, unit, results, randomly, seconds_from_now), tests))
        outcomes = [line for line in _lines(results) if line["outcome"] != "begun"]
    counts = Counter(outcome["outcome"] for outcome in outcomes)
    failed = frozenset(outcome["test"] for outcome in outcomes if outcome["outcome"] == "failed")
    known, gating = recorded(), []
    for test in sorted(failed):
        gating += [test] if test in known or not report else []
        click.echo(f"FAILED {test}" + ("" if test in known else " (no run has recorded that it passed)"))
    if keep:
        record({o["test"]: o["cpu_s"] for o in outcomes if o["outcome"] == "passed"}, failed)
    # A process that failed without a test of its own that did: a file that cannot be imported.
    broken = [u.files for u, how in zip(tests, ended, strict=True) if how == "failed" and not _in(failed, u)]
    cut, cpu_s = sum(how == "cut" for how in ended), sum(outcome["cpu_s"] for outcome in outcomes)
    click.echo(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {cpu_s:.0f} CPU s")
    click.echo(f"{cut} of {len(tests)} pieces of groups of files did not end in the time")
    _end_run(number, part, good=not broken and not failed, code=1 if broken or gating else 0)


def _in(failed: frozenset[str], unit: Unit) -> bool:
    return any(test.partition("::")[0] in unit.files for test in failed)


def _end_run(number: int, part: Part, *, good: bool, code: int) -> NoReturn:
    """Prints the last lines and exits."""
    if not good and not code:
        click.echo("no test failed that is known to pass: what failed is told alone")
    click.echo(f"shard {number} ({part.name}): {'passed' if good else 'FAILED'}; again: make test-shard SHARD={number}")
    sys.exit(code)


def run(python: Path, unit: Unit, results: Path, seed: str, until_s: float) -> str:
    """Runs a unit's tests; returns "passed", "failed", or "cut" where the time ended before them.

    Args:
        python: interpreter with pytest.
        unit: of tests.
        results: a file that gets a line for each test that ended.
        seed: of the order in the file.
        until_s: of the monotonic clock, when the tests are interrupted.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return "cut"
    command = [str(python), "-m", "pytest", "-q", "-m", "slow", "-p", "tests.shards.bounded", "-p", "no:cacheprovider"]
    command += [
        f"--randomly-seed={seed}",
        "--piece",
        f"{unit.piece}/{unit.pieces}",
        "--results",
        str(results),
        "--continue-on-collection-errors",
        *unit.files,
    ]
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: an interrupt reaches pytest and what it started.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ)
        )
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return "cut"
        if code in (0, _NO_TESTS):
            return "passed"
        output.seek(0)
        click.echo(output.read())
    _fail_unended(results, process.pid)
    return "failed"


def _lines(results: Path) -> list[dict[str, Any]]:
    """Lines of a file of results: see `tests.shards.bounded`."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def _fail_unended(results: Path, pid: int) -> None:
    """Adds a failure of the test in which a process died, by its timeout or a crash, if there is one."""
    lines = _lines(results)
    ended = {line["test"] for line in lines if line["outcome"] != "begun"}
    died = [line["test"] for line in lines if line.get("pid") == pid and line["test"] not in ended]
    with results.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"test": test, "outcome": "failed", "cpu_s": 0.0}) + "\n" for test in died)


def _end(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _python(part: Part, timeout_s: float) -> Path:
    """The interpreter of a part's environment, which is made within a time if need be; this process's for ``.venv``."""
    if part.environment == ".venv":
        return Path(sys.executable)
    subprocess.run(["make", f"{part.environment}/.stamp"], cwd=ROOT, check=True, timeout=timeout_s)
    return ROOT / part.environment / "bin" / "python"


if __name__ == "__main__":
    main()
