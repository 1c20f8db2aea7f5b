"""What planned stages bound: no cut is left out that is faster."""

from __future__ import annotations

import msgspec
import pytest

from autopar.cost import CostModel
from autopar.plan import PlanContent
from autopar.schedule import get
from autopar.schedule.branches import Branches
from autopar.search import alpa
from autopar.search.pipeline.candidates import CuttableStep
from autopar.search.pipeline.plan_candidate import closed_by_busy, keep_busy, least_busy_s, plan_candidate
from autopar.search.pipeline.search import pipeline
from autopar.search.store import Key, Store
from tests.search.inter.test_tiny_steps import problem, slicings
from tests.search.problems import f32, toy


def content_of(forward_s: float, backward_s: float, update_s: float, memory_bound: bool = False) -> PlanContent:
    """A planned stage that takes such seconds a step."""
    plan = alpa(problem(toy(1), layers=1)).content
    times = (("forward", forward_s), ("backward", backward_s), ("update", update_s))
    stage = msgspec.structs.replace(plan.stages[0], work_times=times)
    return msgspec.structs.replace(plan, stages=(stage,), memory_bound=memory_bound, num_microbatches=4)


def keys_of(store: Store, *devices: int) -> list[Key]:
    """Keys of a stage on so many devices."""
    return [store.key("busy", problem(toy(1), layers=1).graph, n) for n in devices]


@pytest.mark.slow
def test_a_stage_begins_when_the_first_microbatch_has_passed_those_before():
    store = Store()
    first, second = keys_of(store, 1, 2)
    table = get("1f1b").table(2, 4)
    assert least_busy_s(store, {0: first, 1: second}, table) == 0.0
    keep_busy(store, first, content_of(4.0, 8.0, 1.0))
    keep_busy(store, second, content_of(8.0, 16.0, 2.0))
    assert least_busy_s(store, {0: first, 1: second}, table) == pytest.approx(4.0 / 4 + 8.0 + 16.0 + 2.0)
    assert least_busy_s(store, {0: second, 1: first}, table) == pytest.approx(26.0)
    assert closed_by_busy(store, {0: first, 1: second}, table, 27.1) is None
    closed = closed_by_busy(store, {0: first, 1: second}, table, 27.0)
    assert closed is not None and closed.least_s == pytest.approx(27.0)


def test_a_stage_that_the_memory_limit_changed_bounds_nothing():
    store = Store()
    (key,) = keys_of(store, 1)
    keep_busy(store, key, content_of(4.0, 8.0, 1.0, memory_bound=True))
    assert least_busy_s(store, {0: key}, get("1f1b").table(1, 4)) == 0.0


def test_a_branch_waits_for_what_it_reads_and_a_worker_runs_its_stages_in_turn():
    """Stages 0 and 1 side by side, 2 after both on the worker of 1; each takes 26 s, 2 s of them for a microbatch."""
    store = Store()
    keys = dict(enumerate(keys_of(store, 1, 2, 3)))
    for key in keys.values():
        keep_busy(store, key, content_of(8.0, 16.0, 2.0))
    table = Branches(((), (), (0, 1)), (0, 1, 1)).table(3, 4)
    assert least_busy_s(store, {0: keys[0], 1: keys[1]}, table) == pytest.approx(26.0)
    assert least_busy_s(store, keys, table) == pytest.approx(52.0)
    apart = Branches(((), (), (0, 1)), (0, 1, 2)).table(3, 4)
    assert least_busy_s(store, keys, apart) == pytest.approx(28.0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("devices", "bandwidth", "width", "schedule"),
    [(2, 1e4, 8, "auto"), (2, 1e8, 16, "gpipe"), (3, 1e6, 8, "1f1b"), (4, 1e7, 16, "auto")],
)
def test_no_cut_that_is_faster_is_left_out(devices, bandwidth, width, schedule):
    cluster = toy(devices, bandwidth=bandwidth)
    args = ([f32(8, width), f32(width, 8), f32(8, 4 * width)], f32(16, 8))
    whole = problem(cluster, args=args, num_stages=None, num_microbatches=None, schedule=schedule)
    assert isinstance(whole.cost_model, CostModel) and whole.source is not None
    seconds = []
    for candidate in slicings(whole) or ():
        seconds.append(plan_candidate(CuttableStep(whole, whole.source, alpa), candidate).step_time)
    assert len(seconds) >= 5
    assert pipeline(whole, alpa).step_time <= min(seconds)
