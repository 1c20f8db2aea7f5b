"""Which forms of a plan are planned in which order, and what those that were planned say to the next."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import msgspec
import pytest

import autopar
from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.search.enumeration.forms import AMPLE_STAGE, ONE_STAGE, PIPELINES, Tried, forms
from tests.search.problems import f32, problem_of, toy


def step(w, x):
    return w - jnp.tanh(x @ w).sum()


ARGS = (f32(4, 4), f32(8, 4))


@pytest.mark.parametrize(
    ("nodes", "devices", "options", "expected"),
    [
        (1, 4, {}, (ONE_STAGE, PIPELINES)),
        (2, 2, {}, (AMPLE_STAGE, PIPELINES, ONE_STAGE)),
        (1, 4, {"schedule": "1f1b"}, (PIPELINES, ONE_STAGE)),
        (2, 2, {"schedule": "1f1b"}, (PIPELINES, ONE_STAGE)),
        (2, 2, {"schedule": "none"}, (ONE_STAGE, PIPELINES)),
        (1, 1, {}, (ONE_STAGE,)),
        (2, 2, {"num_stages": 1}, (ONE_STAGE,)),
        (1, 4, {"num_stages": 2}, (PIPELINES,)),
        (1, 4, {"mesh_shape": (2, 2)}, (ONE_STAGE,)),
        (2, 4, {"mesh_shape": (2, 2)}, (ONE_STAGE,)),
        (2, 4, {"mesh_shape": (2,)}, (AMPLE_STAGE, PIPELINES, ONE_STAGE)),
        (1, 4, {"mesh_shape": (2, 2), "schedule": "1f1b"}, (PIPELINES, ONE_STAGE)),
        (1, 4, {"mesh_shape": (2, 2), "num_stages": 2}, (PIPELINES,)),
    ],
)
def test_order(nodes, devices, options, expected):
    problem = problem_of(step, ARGS, toy(devices, nodes=nodes), **{"num_stages": None, "schedule": "auto", **options})
    assert forms(problem, cuts_stages=False, tries_pipelines=True) == expected


def test_what_a_strategy_does_itself_is_not_done_next_to_it():
    problem = problem_of(step, ARGS, toy(2, nodes=2), num_stages=None, schedule="auto")
    assert forms(problem, cuts_stages=True, tries_pipelines=True) == (PIPELINES,)
    assert forms(problem, cuts_stages=False, tries_pipelines=False) == (ONE_STAGE,)
    single = problem_of(step, ARGS, toy(1), num_stages=None, schedule="auto")
    assert forms(single, cuts_stages=True, tries_pipelines=True) == (ONE_STAGE,)


def test_the_next_form_has_the_seconds_of_the_best_and_what_one_stage_exposes():
    plan = autopar.parallelize(step, cluster=toy(2), num_stages=1).plan(*ARGS)
    search = msgspec.structs.replace(plan.content.search, objective=2.0)

    def taking(seconds):
        return replace(plan, content=msgspec.structs.replace(plan.content, step_time=seconds, search=search))

    tried = Tried()
    assert (tried.cutoff_s, tried.exposed) == (math.inf, 1.0)
    tried = tried.planned(ONE_STAGE, taking(1.0), 0.1)
    assert (tried.cutoff_s, tried.exposed) == (1.0, 0.5)
    assert tried.planned(PIPELINES, taking(0.91), 0.1).cutoff_s == 1.0, "pipelines must save a share"
    tried = tried.planned(PIPELINES, taking(0.8), 0.1)
    assert (tried.cutoff_s, tried.exposed, tried.one_stage.step_time) == (0.8, 0.5, 1.0)
    assert tried.planned(ONE_STAGE, taking(0.79), 0.1).cutoff_s == 0.79
    assert tried.planned(ONE_STAGE, taking(3.0), 0.1).exposed == 1.0, "no more than all is exposed"


def test_the_failure_of_one_stage_is_told_first():
    one, several = InfeasiblePlanError("one"), MicrobatchError("several")
    assert Tried().failed(PIPELINES, several).failed(ONE_STAGE, one).failures == (one, several)
    assert Tried().failed(ONE_STAGE, one).failed(PIPELINES, several).failures == (one, several)
