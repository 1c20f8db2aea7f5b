"""A stack of layers is taken apart for the number of stages of a region, and no finer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.search import Problem, alpa
from autopar.search.policy import SizePolicy
from autopar.search.several_stages import SeveralStages
from examples import gpt, mlp
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


def _of_layers(**sizes: Any) -> Problem:
    fn, args = gpt.build(abstract=True, scan=True, hidden=64, batch=32, **sizes)
    return problem_of(fn, args, autopar.Cluster.load("dgx-a100", nodes=32), num_stages=None, num_microbatches=None)


@pytest.mark.parametrize(("layers", "first"), [(16, 8), (13, 2), (12, 4)])
def test_even_stages_are_first_of_the_middle_number(layers: int, first: int) -> None:
    """Of 2, 4, 8 and 16 stages of 16 layers 8 come first: more take longer to plan, fewer have larger messages."""
    source = _Source()
    planner: Any = SeveralStages(_of_layers(layers=layers), source, None, alpa)  # type: ignore[arg-type]
    with pytest.raises(_TakenApart):
        planner.even()
    assert source.asked == [first]


@pytest.mark.parametrize(("cutoff_s", "loops"), [(math.inf, [True, False]), (1.0, [True])])
def test_single_layers_are_cut_where_one_loop_a_stage_has_no_plan(cutoff_s: float, loops: list[bool]) -> None:
    """They may fit where the first or the last stage does not; once there is another plan they are not tried."""
    problem, asked = _of_layers(layers=8), list[bool]()
    region = replace(problem.subproblem, tried_stages=(4,), cutoff_s=cutoff_s)
    sizes = SizePolicy(tiny_operators=0, few_operators=0, small_operators=0)
    problem = replace(problem, subproblem=region, policy=replace(problem.policy, sizes=sizes))

    def searched(search: Any, layered: bool) -> Any:
        asked.append(layered)
        raise InfeasiblePlanError("nothing fits")

    planner: Any = SeveralStages(problem, _Source(), None, alpa)  # type: ignore[arg-type]
    with (
        mock.patch.multiple(
            SeveralStages,
            _layered=lambda self, stages, one_loop: SimpleNamespace(graph=problem.graph, one_loop=one_loop),
            _searched=lambda self, search, layered: searched(search, layered.one_loop),
        ),
        pytest.raises(InfeasiblePlanError),
    ):
        planner.pipeline()
    assert asked == loops
