"""``python -m tests.mutations [TEXT ...]``: faults whose names contain a TEXT, or all; exits with 1 on a miss.

For each fault the tests that it names run first. With ``--reach`` follow, until one fails, the cheapest default tests
that run the changed block, and with ``--slow`` the slow tests of the files that reach it. Outcomes are kept as lines of
``--out``, and what is there is not tried again. ``--keep`` writes the tests that failed into `drawn.toml`.
"""

from __future__ import annotations

import compileall
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from tests.mutations.draw import text_of
from tests.mutations.pick import Reached
from tests.mutations.run import DRAWN, ROOT, Fault, Outcome, faults, fits, put, tried, warm

#: Tests of the first try of a fault that no test is known to catch, and files of one try of slow tests.
_FIRST, _SLOW_FILES = 12, 3


@dataclass(frozen=True)
class Costs:
    """What a fault may cost.

    Args:
        default_s: CPU seconds of default tests.
        most: default tests.
        slow_s: CPU seconds of slow tests; 0 where none are tried.
    """

    default_s: float
    most: int
    slow_s: float


@click.command()
@click.argument("texts", nargs=-1)
@click.option("--reach", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Lines of outcomes; goes on where it ends."
)
@click.option("--default-s", default=30.0, help="CPU seconds of default tests that are tried for a fault.")
@click.option("--most", default=150, help="Default tests that are tried for a fault.")
@click.option("--slow-s", default=0.0, help="CPU seconds of slow tests, where no default test fails.")
@click.option("--keep", is_flag=True, help="Writes the tests that failed into drawn.toml.")
def main(texts: tuple[str, ...], reach: tuple[Path, ...], out: Path | None, keep: bool, **costs: Any) -> None:
    """Says for each fault which test fails."""
    every = (*faults(), *faults(DRAWN))
    for gone in (f for f in every if not fits(f)):
        click.echo(f"gone    {gone.name}")
    for same in (f for f in every if f.equivalent):
        click.echo(f"same    {same.name}: {same.equivalent}")
    chosen = [f for f in every if fits(f) and not f.equivalent and (not texts or any(t in f.name for t in texts))]
    known = _read(out)
    new = [f for f in chosen if f.name not in known]
    if new:
        compileall.compile_dir(ROOT / "autopar", quiet=1)
        warm()
    reached = Reached.read(*reach)
    for fault in new:
        known[fault.name] = _tried(fault, reached, Costs(**costs))
        click.echo(f"{known[fault.name]['outcome']:8} {fault.name}  {known[fault.name]['by']}")
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"fault": fault.name, **known[fault.name]}) + "\n")
    if keep:
        _keep(known)
    _end(chosen, known)


def _read(out: Path | None) -> dict[str, Mapping[str, Any]]:
    if out is None or not out.exists():
        return {}
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {line["fault"]: line for line in lines}


def _tries(fault: Fault, reached: Reached, costs: Costs) -> Iterator[tuple[str, Sequence[str], float]]:
    """Marks, tests, and the most CPU seconds of each try."""
    if fault.tests:
        yield "not slow", fault.tests, 300.0
    more = [t for t in reached.of(fault, costs.default_s, costs.most) if t not in fault.tests]
    for tests in (more[:_FIRST], more[_FIRST:]):
        yield "not slow", tests, 10 * costs.default_s
    files = reached.files_of(fault) if costs.slow_s else ()
    for first in range(0, len(files), _SLOW_FILES):
        yield "slow", files[first : first + _SLOW_FILES], costs.slow_s


def _tried(fault: Fault, reached: Reached, costs: Costs) -> Mapping[str, Any]:
    ran: Counter[str] = Counter()
    cpu_s: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(fault, folder)
        by, outcome = "", "survives"
        for marked, tests, limit_s in _tries(fault, reached, costs):
            if marked == "slow" and cpu_s[marked] >= costs.slow_s:
                break
            one: Outcome = tried(folder, tests, marked, limit_s)
            ran[marked] += one.ran
            cpu_s[marked] += one.cpu_s
            if one.by.startswith("tests/") and _fails_anyway(one.by, marked):
                one = tried(folder, tests[tests.index(one.by) + 1 :] if one.by in tests else (), marked, limit_s)
            # Slow tests that do not end in their time say nothing.
            if one.by and not (marked == "slow" and one.by.startswith("signal")):
                by, outcome = one.by, "caught" if marked != "slow" else "slow"
                break
    return {"outcome": outcome, "by": by, "ran": dict(ran), "cpu_s": {k: round(v, 1) for k, v in cpu_s.items()}}


def _fails_anyway(test: str, marked: str) -> bool:
    """Whether a test fails where nothing is wrong: it sees no fault."""
    with tempfile.TemporaryDirectory() as name:
        put(None, Path(name))
        return bool(tried(Path(name), [test], marked).by)


def _keep(known: Mapping[str, Mapping[str, Any]]) -> None:
    kept = []
    for fault in faults(DRAWN):
        outcome = known.get(fault.name)
        if outcome is not None:
            fault = replace(fault, tests=_names(fault, outcome))
        kept.append(fault)
    DRAWN.write_text(text_of(kept), encoding="utf-8")


def _names(fault: Fault, outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """The test that failed; the tests that were there where they hang; none where no default test fails."""
    if outcome["outcome"] != "caught":
        return ()
    return (outcome["by"],) if outcome["by"].startswith("tests/") else fault.tests


def _end(chosen: Sequence[Fault], known: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the sums; a fault by hand that is not caught, or a drawn one that is no longer, fails the run."""
    counts = Counter(known[f.name]["outcome"] for f in chosen)
    caught, slow = counts["caught"], counts["slow"]
    cpu_s = sum(sum(known[f.name]["cpu_s"].values()) for f in chosen)
    click.echo(", ".join(f"{number} {name}" for name, number in sorted(counts.items())) + f"; {cpu_s:.0f} CPU s")
    if caught + slow:
        click.echo(f"default tests catch {caught / (caught + slow):.1%} of what these and slow tests catch")
    sys.exit(1 if any(f.tests and known[f.name]["outcome"] != "caught" for f in chosen) else 0)


if __name__ == "__main__":
    main()
