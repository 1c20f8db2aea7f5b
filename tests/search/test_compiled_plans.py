"""The compiler in the loop, with a compiler that says what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.search.compiled_plans import PlanKind, Planned, fastest_compiled
from autopar.search.policy import SearchPolicy
from tests.plan.plans import small_plan

LIMIT = 1000
#: By name of the kind: predicted seconds, compiled seconds, compiled bytes over predicted ones.
Truth = dict[str, tuple[float, float, float]]


def outcome(truth: Truth, least: int = 0) -> tuple[Plan, list[tuple[str, int]]]:
    built: list[tuple[str, int]] = []

    def kind(number: int, name: str) -> PlanKind[Any]:
        def search(limit: int) -> Planned[Any]:
            if limit < least:
                raise InfeasiblePlanError(f"nothing fits {limit} bytes", least_bytes=least)
            content = replace(
                small_plan().content, step_time=truth[name][0], peak_memory=limit, num_microbatches=number + 1
            )
            return Planned(name, Plan(content))

        return PlanKind(name, search)

    def build(planned: Planned[Any]) -> SimpleNamespace:
        _, seconds, factor = truth[planned.traced]
        built.append((planned.traced, planned.plan.peak_memory))
        footprint = int(factor * planned.plan.peak_memory)
        return SimpleNamespace(footprint_bytes=footprint, corrected_step_s=seconds, corrections="products 1 s -> 2 s")

    kinds = [kind(number, name) for number, name in enumerate(truth)]
    found, _ = fastest_compiled(kinds, LIMIT, build, SearchPolicy(), "cpu")
    return found.plan, built


def test_the_plan_whose_program_is_fastest_is_taken() -> None:
    plan, built = outcome({"alpa": (1.0, 2.0, 1.0), "zero1": (1.1, 1.2, 1.0), "zero3": (1.2, 1.5, 1.0)})
    assert [name for name, _ in built] == ["alpa", "zero1", "zero3"]
    assert plan.step_time == 1.1
    assert plan.content.notes[-2:] == (
        "compiled for cpu: the fastest of 3 plans of different kinds, zero1; 1.2 s a step where 1.1 s were predicted, "
        "1 kB a device where 1 kB were predicted",
        "corrected by the compiler: products 1 s -> 2 s",
    )
    rows = {c.name: c.step_time for c in plan.content.search.considered if c.note.startswith("compiled for cpu")}
    assert rows == {"alpa": 2.0, "zero1": 1.2, "zero3": 1.5}


def test_what_was_asked_for_is_compiled_and_what_is_much_slower_is_not() -> None:
    slow = {"b": (1.2, 3.0, 1.0), "c": (1.1, 3.0, 1.0), "d": (1.22, 3.0, 1.0)}
    truth = {"alpa": (1.0, 1.0, 1.0), "a": (9.0, 0.1, 1.0), **slow}
    _, built = outcome(truth)
    assert [name for name, _ in built] == ["alpa", "c", "b"]


def test_a_program_above_the_limit_is_planned_again_and_never_taken_above_it() -> None:
    plan, built = outcome({"alpa": (1.0, 1.0, 1.25)})
    assert built == [("alpa", LIMIT), ("alpa", int(LIMIT / 1.25 * 0.98))]
    assert plan.content.memory_limit == LIMIT and plan.peak_memory * 1.25 <= LIMIT


def test_a_kind_without_a_program_that_fits_is_left_out() -> None:
    plan, _ = outcome({"alpa": (1.0, 0.5, 1.05), "zero3": (1.2, 1.5, 1.0)}, least=990)
    assert plan.step_time == 1.2
    assert any(c.name == "alpa" and c.step_time is None for c in plan.content.search.considered)


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"needed is 1\.0\d kB"):
        outcome({"alpa": (1.0, 1.0, 1.05)}, least=990)
