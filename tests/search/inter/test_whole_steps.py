"""Numbers of stages are left out where no number of microbatches makes equal stages faster than the plan at hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from autopar.errors import MicrobatchError
from autopar.search.enumeration import whole_steps
from autopar.search.enumeration.whole_steps import stages_that_may_be_faster
from autopar.search.outcome import Bounded
from examples import mlp
from tests.search.problems import problem_of, toy

COUNTS = (1, 2, 4, 8, 16, 32, 64)


def _problem():
    fn, args = mlp.build(abstract=True, layers=8, hidden=32, batch=64)
    return problem_of(fn, args, toy(8), num_stages=None, num_microbatches=None)


def _tried(monkeypatch, u, v, cutoff_s, exposed=1.0, possible=lambda count: True):
    """Numbers of stages that are tried where a step of all stages takes u + v m seconds in m microbatches."""

    def in_form(form):
        if not possible(form.microbatches):
            raise MicrobatchError(f"{form.microbatches} microbatches")
        return SimpleNamespace(graph=None)

    def equal(problem, graph, count, stages, cutoff_s=math.inf, sufficient_s=math.inf):
        return u + v * count

    monkeypatch.setattr(whole_steps, "_equal_stages_s", equal)
    monkeypatch.setattr(whole_steps, "least_by_stages", lambda problem, counts: dict.fromkeys((2, 4, 8), 0.0))
    step = SimpleNamespace(in_form=in_form)
    faster = stages_that_may_be_faster(_problem(), step, None, cutoff_s, exposed)
    return () if isinstance(faster, Bounded) else faster


@pytest.mark.few(16)
@pytest.mark.parametrize("v", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("cutoff_s", [1.01, 1.05, 1.2, 1.5, 2.0])
@pytest.mark.parametrize("exposed", [1.0, 0.8])
def test_what_is_left_of_the_bubble_counts_in_every_number_of_microbatches(monkeypatch, v, cutoff_s, exposed):
    left = _problem().policy.schedules.bubble_left

    def least_s(stages):
        return min((1 + v * m) * (1 + left * (stages - 1) / m) for m in COUNTS if m <= 32 * stages)

    # What takes as long without a bubble, in two microbatches a stage, is left out at once.
    wanted = tuple(s for s in (2, 4, 8) if exposed * max(1 + v * 2 * s, least_s(s)) < cutoff_s)
    assert _tried(monkeypatch, 1.0, v, cutoff_s, exposed) == wanted


def test_what_cannot_be_cut_is_tried(monkeypatch):
    assert _tried(monkeypatch, 1.0, 0.1, 1.05, possible=lambda count: count < 2) == (2, 4, 8)
