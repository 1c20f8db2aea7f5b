"""A stack of layers is taken apart for the number of stages of a region, and no finer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from autopar.search import alpa
from autopar.search.several_stages import SeveralStages
from examples import mlp
from tests.search.problems import problem_of, toy


class _TakenApart(Exception):
    """Ends planning once it is known for how many stages."""


@dataclass
class _Source:
    """Notes for how many stages stacks are to be taken apart."""

    asked: list[int | None] = field(default_factory=list)

    def layered(self, num_stages: int | None, *_: Any, **__: Any) -> None:
        self.asked.append(num_stages)
        raise _TakenApart


@pytest.mark.parametrize(("tried", "on_each", "stages"), [(None, 1, None), ((3,), 1, 3), ((4,), 2, 8)])
def test_a_region_takes_stacks_apart_for_its_stages(
    tried: tuple[int, ...] | None, on_each: int, stages: int | None
) -> None:
    problem, source = problem_of(*mlp.build(abstract=True), toy(4)), _Source()
    region = replace(problem.subproblem, tried_stages=tried, stages_per_worker=on_each)
    job = replace(problem.job, num_stages=None)
    planner: Any = SeveralStages(replace(problem, job=job, subproblem=region), source, None, alpa)  # type: ignore[arg-type]
    with pytest.raises(_TakenApart):
        planner.pipeline()
    assert source.asked == [stages]
