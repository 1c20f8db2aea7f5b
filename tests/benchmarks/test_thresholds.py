"""The study of thresholds: which are read, and that none that is a choice is left out."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from autopar.search.policy import SearchPolicy
from benchmarks.drawn import Case
from benchmarks.thresholds import VALUES, answers, recorded, with_threshold


def _reasons() -> dict[str, str]:
    """By threshold the reason for its value."""
    reasons = {}
    for part in fields(SearchPolicy()):
        of_part = getattr(SearchPolicy(), part.name)
        if not is_dataclass(of_part):
            continue
        text = re.sub(r"\s+", " ", (type(of_part).__doc__ or "").split("Args:")[-1])
        names = "|".join(f.name for f in fields(of_part))
        for match in re.finditer(rf" ({names}): (.*?)(?= (?:{names}): |$)", text):
            reasons[f"{part.name}.{match[1]}"] = match[2]
    return reasons


def test_each_threshold_without_a_measurement_is_in_the_study() -> None:
    reasons = _reasons()
    assert len(reasons) > 30
    chosen = {name for name, reason in reasons.items() if re.search(r"\b[aA] choice\b", reason)}
    assert chosen <= set(VALUES)
    for name, others in VALUES.items():
        part, field = name.split(".")
        assert getattr(getattr(SearchPolicy(), part), field) not in others


def test_a_policy_that_is_recorded_is_equal_and_says_what_was_read() -> None:
    recording, read = recorded(SearchPolicy())
    assert recording.partition.most_near == SearchPolicy().partition.most_near
    assert read == {"partition.most_near"}
    assert with_threshold(SearchPolicy(), "partition.most_near", 7).partition.most_near == 7


@pytest.mark.slow
def test_a_threshold_that_a_search_reads_may_change_its_plan() -> None:
    """A step that must be half as long to be another keeps the plan of one stage."""
    case = Case("", "mlp", "small", {"batch": 64}, "dgx-a100", 1)
    found = answers(case, ("effort.least_gain", "branches.most_candidates"), 10**12)
    assert set(found) == {"", "effort.least_gain"} and found[""][0].work > 0
    assert answers(case, (), 1) == {}, "a problem that takes longer is left out"
