"""``python -m tests.mutations.pick REACH --seed N --count N``: draws faults and tries the tests that run their blocks.

REACH is what `tests.mutations.reach` wrote. Of the tests that run the block of a fault the cheapest of each file are
tried, those of the fault's own package first. `drawn.toml` gets each fault with the test that failed first, or none.
"""

from __future__ import annotations

import ast
import collections
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from tests.mutations.draw import Drawn, drawn
from tests.mutations.reach import blocks
from tests.mutations.run import DRAWN, ROOT, Fault, caught, faults


@dataclass(frozen=True)
class Reached:
    """What tests cost and run.

    Args:
        cpu_s: by test.
        tests: by file of autopar and first line of a block.
    """

    cpu_s: Mapping[str, float]
    tests: Mapping[tuple[str, int], frozenset[str]]

    @staticmethod
    def read(path: Path) -> Reached:
        """From the file of `tests.mutations.reach`."""
        cpu_s: dict[str, float] = {}
        tests: dict[tuple[str, int], set[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            test, seconds, ran = json.loads(line)
            cpu_s[test] = seconds
            for file, lines in ran.items():
                for first in lines:
                    tests.setdefault((file, first), set()).add(test)
        return Reached(cpu_s, {block: frozenset(names) for block, names in tests.items()})

    def of(self, fault: Drawn, budget_s: float, most: int) -> tuple[str, ...]:
        """Tests to try, in order.

        Args:
            fault: that they should catch.
            budget_s: CPU seconds that they cost together.
            most: of them.
        """
        tree = ast.parse((ROOT / fault.file).read_text(encoding="utf-8"))
        around = [(last - first, first) for first, last in blocks(tree) if first <= fault.line <= last]
        found = self.tests.get((fault.file, min(around)[1]), frozenset()) if around else frozenset()
        own = f"tests/{fault.file.split('/')[1]}/"
        near = self._spread((t for t in found if t.startswith(own)), budget_s / 2, most // 2)
        spent_s = sum(self.cpu_s[t] for t in near)
        return (*near, *self._spread(found.difference(near), budget_s - spent_s, most - len(near)))

    def _spread(self, tests: Iterable[str], budget_s: float, most: int) -> tuple[str, ...]:
        """The cheapest of each file in turn."""
        files: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda t: (self.cpu_s[t], t)):
            files.setdefault(test.partition("::")[0], []).append(test)
        ranked = sorted((place, self.cpu_s[t], t) for own in files.values() for place, t in enumerate(own))
        taken: list[str] = []
        for _, seconds, test in ranked:
            if len(taken) < most and seconds <= budget_s:
                taken.append(test)
                budget_s -= seconds
        return tuple(taken)


def text_of(found: Iterable[Fault]) -> str:
    """Faults as `tests.mutations.run.faults` reads them."""
    parts = ["# Drawn by `python -m tests.mutations.pick`; not written by hand.\n"]
    for fault in found:
        fields = (("name", fault.name), ("file", fault.file), ("old", fault.old), ("new", fault.new))
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields]
        parts.append("\n".join(["[[faults]]", *lines, f"tests = {json.dumps(fault.tests)}"]) + "\n")
    return "\n".join(parts)


@click.command()
@click.argument("reach", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seed", default=1)
@click.option("--count", default=176)
@click.option("--budget-s", default=15.0, help="CPU seconds of the tests that are tried for a fault.")
@click.option("--most", default=60, help="Tests that are tried for a fault.")
def main(reach: Path, seed: int, count: int, budget_s: float, most: int) -> None:
    """Says of each fault which test catches it, and writes all that some test runs."""
    reached = Reached.read(reach)
    found = list(faults(DRAWN))
    outcomes: collections.Counter[str] = collections.Counter()
    for one in drawn(ROOT, seed, count):
        tests = reached.of(one, budget_s, most)
        fault = Fault(one.name, one.file, one.old, one.new, tests)
        by = ""
        if tests:
            with tempfile.TemporaryDirectory() as folder:
                by = caught(fault, Path(folder))
        outcomes["caught" if by else "survives" if tests else "unreached"] += 1
        click.echo(f"{'caught' if by else 'survives' if tests else 'unreached'}  {one.name}  {by}")
        kept = {f.name for f in found}
        if tests and one.name not in kept:
            name = by.partition(" ")[2] if by.startswith(("FAILED", "ERROR")) else ""
            found.append(Fault(one.name, one.file, one.old, one.new, (name,) if name else tests if by else ()))
            DRAWN.write_text(text_of(found), encoding="utf-8")
    click.echo(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
