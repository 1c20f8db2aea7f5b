"""Tests with many parameters of which the default suite runs few: the marker ``few``.

`spread` is where a caller starts. It knows nothing of what a test does: it takes the parameters that together have the
most values, and the most pairs of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Settings = frozenset[tuple[str, str]]


def settings(ids: Sequence[str]) -> list[Settings]:
    """Settings of each test of a function: the value of each argument, and each pair of values.

    Args:
        ids: what pytest has in brackets after the function's name. Values lie between dashes; where a value has a dash
            of its own in some of them, the whole is one setting.
    """
    parts = [name.split("-") for name in ids]
    if len({len(p) for p in parts}) > 1:
        parts = [[name] for name in ids]
    return [_of(p) for p in parts]


def _of(values: Sequence[str]) -> Settings:
    single = [(str(place), value) for place, value in enumerate(values)]
    pairs = [(f"{a} {b}", f"{i}-{j}") for (a, i), (b, j) in itertools.combinations(single, 2)]
    return frozenset([*single, *pairs])


def spread(tests: Sequence[Settings], count: int) -> tuple[int, ...]:
    """Places of ``count`` of the tests that together have the most settings; always the same ones.

    Args:
        tests: settings of each.
        count: how many are taken; all where there are fewer.
    """
    missing = Settings().union(*tests)
    left, taken = list(range(len(tests))), []
    while left and len(taken) < count:
        best = max(left, key=lambda k: len(tests[k] & missing))
        left.remove(best)
        taken.append(best)
        missing -= tests[best]
    return tuple(sorted(taken))
