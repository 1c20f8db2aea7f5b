"""Which tests may see a fault: those that run the changed block, the cheapest of each file first.

`Reached` is where a caller starts. It reads what `tests.mutations.reach` wrote of the same commit.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.reach import blocks
from tests.mutations.run import ROOT, Fault


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
    def read(*paths: Path) -> Reached:
        """From files of `tests.mutations.reach`."""
        cpu_s: dict[str, float] = {}
        tests: dict[tuple[str, int], set[str]] = {}
        for line in (line for path in paths for line in path.read_text(encoding="utf-8").splitlines()):
            test, seconds, ran = json.loads(line)
            cpu_s[test] = seconds
            for file, lines in ran.items():
                for first in lines:
                    tests.setdefault((file, first), set()).add(test)
        return Reached(cpu_s, {block: frozenset(names) for block, names in tests.items()})

    def all_of(self, fault: Fault) -> frozenset[str]:
        """All tests that run the block of a fault; those that run its file where none is known to run the block."""
        tree = ast.parse((ROOT / fault.file).read_text(encoding="utf-8"))
        around = [(last - first, first) for first, last in blocks(tree) if first <= fault.line <= last]
        if around and (found := self.tests.get((fault.file, min(around)[1]))):
            return found
        return frozenset().union(*(tests for (file, _), tests in self.tests.items() if file == fault.file))

    def of(self, fault: Fault, budget_s: float, most: int) -> tuple[str, ...]:
        """Tests to try, in order: those of the fault's own package and of the tests that it names first.

        Args:
            fault: that they should catch.
            budget_s: CPU seconds that they cost together.
            most: of them.
        """
        found = self.all_of(fault)
        own = (f"tests/{fault.file.split('/')[1]}/", *fault.tests)
        near = self._spread((t for t in found if t.startswith(own)), budget_s / 2, most // 2)
        spent_s = sum(self.cpu_s[t] for t in near)
        return (*near, *self._spread(found.difference(near), budget_s - spent_s, most - len(near)))

    def files_of(self, fault: Fault) -> tuple[str, ...]:
        """Files with tests that run the block: of the fault's own package first, those with the most tests first."""
        own = f"tests/{fault.file.split('/')[1]}/"
        counts: dict[str, int] = {}
        for test in self.all_of(fault):
            file = test.partition("::")[0]
            counts[file] = counts.get(file, 0) + 1
        return tuple(sorted(counts, key=lambda file: (not file.startswith(own), -counts[file], file)))

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
