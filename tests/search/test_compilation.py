"""Plans made again until the compiled program keeps the memory limit, with programs that need what they are told to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan, PlanContent
from autopar.search.compiled_plans import Planned, build_within
from autopar.search.policy import SearchPolicy
from tests.plan.plans import small_plan

LIMIT = 1000


def planned(peak_bytes: int) -> Planned[Any]:
    traced: Any = None
    return Planned(traced, Plan(replace(small_plan().content, peak_memory=peak_bytes)))


class Compiler:
    """Programs that need ``factor`` times the bytes that their plan predicts."""

    def __init__(self, factor: float, least: int = 0) -> None:
        self.factor = factor
        self.least = least
        self.built: list[int] = []
        self.aims: list[int] = []

    def build(self, planned: Planned[Any]) -> SimpleNamespace:
        self.built.append(planned.plan.peak_memory)
        return SimpleNamespace(footprint_bytes=max(int(self.factor * planned.plan.peak_memory), self.least))

    def search(self, limit: int) -> Planned[Any]:
        self.aims.append(limit)
        if limit < 300:
            raise InfeasiblePlanError(f"nothing fits {limit} bytes", least_bytes=300)
        return planned(limit)

    def run(self, limit: int | None = LIMIT) -> tuple[PlanContent, SimpleNamespace]:
        build: Callable = self.build
        found, program = build_within(planned(LIMIT), limit, build, self.search, SearchPolicy())
        return found.plan.content, program


@pytest.mark.slow
def test_a_program_that_fits_is_built_once():
    compiler = Compiler(1.0)
    content, program = compiler.run()
    assert (compiler.built, compiler.aims) == ([LIMIT], [])
    assert program.footprint_bytes == LIMIT
    assert content.notes == small_plan().content.notes


def test_without_a_limit_nothing_is_measured():
    compiler = Compiler(5.0)
    compiler.run(limit=None)
    assert (compiler.built, compiler.aims) == ([LIMIT], [])


def test_what_was_measured_scales_the_next_aim():
    compiler = Compiler(1.25)
    content, program = compiler.run()
    assert compiler.aims == [int(LIMIT / 1.25 * 0.98)]
    assert program.footprint_bytes <= LIMIT
    assert content.peak_memory == compiler.aims[0]
    assert content.memory_limit == LIMIT
    assert not any("above the limit" in note for note in content.notes)


def test_the_least_is_taken_and_noted_where_nothing_fits():
    compiler = Compiler(1.5, least=1080)
    content, program = compiler.run()
    assert len(compiler.built) <= SearchPolicy().stages.limit_attempts
    assert program.footprint_bytes == 1080
    assert any("above the limit" in note for note in content.notes)


def test_a_search_without_an_answer_ends_it():
    compiler = Compiler(4.0)
    with pytest.raises(InfeasiblePlanError) as refused:
        compiler.run()
    assert compiler.aims[-1] < 300
    assert refused.value.least_bytes == 4 * min(compiler.built) > 1.1 * LIMIT
