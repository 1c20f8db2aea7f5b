"""Thresholds of the search: a plan and its work units with another value of each, on problems drawn by seed.

Each threshold of `VALUES` is given the two values that stand there, mostly half and twice, and problems are planned
with all others as they are. Problems are the free ones of `benchmarks drawn` on several devices that the search solves
within ``most_work`` units. A threshold that a search does not read has no part in its plan, which is not made again
then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import autopar
from autopar import Plan
from autopar.api.parallelize import parallelize_with
from autopar.search.policy import SearchPolicy
from benchmarks.drawn import Case, draw, parallel_of
from benchmarks.process import in_new_process
from benchmarks.report import Report, Row, Say

SEED = 6006
CASES = 30

#: Units above which a problem is left out: some ten seconds of a core.
MOST_WORK = 1_000_000_000

#: Share of a step that counts as another.
SAME = 1e-6

#: Two other values of each threshold.
VALUES: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "enumeration.most_slicings": (125, 500),
        "enumeration.most_microbatches_per_stage": (8, 32),
        "enumeration.most_uneven": (1.05, 1.5),
        "enumeration.most_uneven_runs": (1.1, 2.0),
        "effort.least_gain": (0.0025, 0.01),
        "effort.least_part": (0.025, 0.1),
        "algebra.least_gain": (0.05, 0.2),
        "padding.most_waste": (0.17, 0.68),
        "padding.most_classes": (1, 6),
        "partition.multiples": (
            (0.5, 0.7, 1.0, 1.35, 2.0, math.inf),
            (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.27, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, math.inf),
        ),
        "partition.most_near": (1, 6),
        "partition.most_other": (4, 16),
        "stages.limit_attempts": (2, 6),
        "branches.most_candidates": (3, 12),
    }
)


def with_threshold(policy: SearchPolicy, name: str, value: Any) -> SearchPolicy:
    """A policy with another value of one threshold, as "partition.most_near"."""
    part, field = name.split(".")
    return replace(policy, **{part: replace(getattr(policy, part), **{field: value})})


def planned(case: Case, policy: SearchPolicy) -> Plan:
    """The plan of a case with these thresholds."""
    parallel, args = parallel_of(case)
    return parallelize_with(parallel.function, replace(parallel.options, policy=policy)).plan(*args)


def recorded(policy: SearchPolicy) -> tuple[SearchPolicy, set[str]]:
    """An equal policy, and the set to which it adds the name of each threshold that is read."""
    read: set[str] = set()

    def of_part(part: str) -> Any:
        plain = getattr(policy, part)
        names = frozenset(f.name for f in fields(plain))

        def get(self: Any, name: str) -> Any:
            if name in names:
                read.add(f"{part}.{name}")
            return object.__getattribute__(self, name)

        recording = type(type(plain).__name__, (type(plain),), {"__getattribute__": get})
        return recording(**{name: getattr(plain, name) for name in names})

    parts = [f.name for f in fields(policy) if is_dataclass(getattr(policy, f.name))]
    return replace(policy, **{name: of_part(name) for name in parts}), read


@dataclass(frozen=True)
class Answer:
    """Seconds of a step, and units of the search; inf and 0 where nothing fits."""

    step_s: float
    work: int


def answers(case: Case, names: Sequence[str], most_work: int) -> dict[str, tuple[Answer, ...]]:
    """By threshold that is read the answers with its two other values, and at "" that of the policy as it is.

    Empty where that takes more than ``most_work`` units, or nothing fits.
    """
    policy = SearchPolicy()

    def answer(policy: SearchPolicy) -> Answer:
        try:
            plan = planned(case, policy)
        except autopar.AutoparError:
            return Answer(float("inf"), 0)
        return Answer(plan.step_time, int(plan.search.work))

    recording, read = recorded(policy)
    usual = answer(recording)
    if not 0 < usual.work <= most_work:
        return {}
    some = [name for name in names if name in read]
    others = {name: tuple(answer(with_threshold(policy, name, v)) for v in VALUES[name]) for name in some}
    return {"": (usual,), **others}


def run(
    quick: bool,
    say: Say,
    seed: int = SEED,
    first: int = 0,
    cases: int = CASES,
    names: Sequence[str] = tuple(VALUES),
    most_work: int = MOST_WORK,
) -> Report:
    """The benchmark.

    Args:
        quick: whether two cases and two thresholds are taken.
        say: prints progress.
        seed: of what is drawn.
        first: number of the first case.
        cases: how many are drawn; those that are not free, on one device, or too long are left out.
        names: thresholds.
        most_work: units above which a case is left out.
    """
    names = tuple(names)[:2] if quick else tuple(names)
    found: dict[str, dict[str, tuple[Answer, ...]]] = {}
    for number in range(first, first + cases):
        case = draw(seed, number)
        if not case.asked or (quick and len(found) == 2):
            continue
        some = in_new_process(answers, case, names, most_work)
        if some:
            found[case.name] = some
            say(f"thresholds: {case.name}, {len(some) - 1} read: {_changes(some)}")
    rows = [_row(name, k, list(found.values())) for name in names for k in (0, 1)]
    return Report(
        "thresholds",
        "what another value of a threshold changes",
        tuple(rows),
        True,
        (f"seed {seed}: {len(found)} problems within {most_work:,} units",),
    )


def _changes(some: Mapping[str, tuple[Answer, ...]]) -> str:
    """Thresholds that change a step, in words."""
    usual = some[""][0]
    changed = [
        f"{name}={value} {answer.step_s / usual.step_s:.3f}"
        for name, others in some.items()
        if name
        for value, answer in zip(VALUES[name], others, strict=True)
        if abs(answer.step_s / usual.step_s - 1) > SAME
    ]
    return ", ".join(changed) or "no step is another"


def _row(name: str, number: int, found: Sequence[Mapping[str, tuple[Answer, ...]]]) -> Row:
    """The row of one other value of a threshold."""
    pairs = [(some[""][0], some[name][number]) for some in found if name in some]
    steps = [other.step_s / usual.step_s for usual, other in pairs]
    works = [other.work / usual.work for usual, other in pairs]
    part, field = name.split(".")
    return {
        "threshold": name,
        "value": getattr(getattr(SearchPolicy(), part), field),
        "other": VALUES[name][number],
        "read_by": len(pairs),
        "other_work": sum(abs(work - 1) > SAME for work in works),
        "other_step": sum(abs(step - 1) > SAME for step in steps),
        "least_step": min(steps, default=1.0),
        "most_step": max(steps, default=1.0),
        "work": sum(works) / max(1, len(works)),
    }
