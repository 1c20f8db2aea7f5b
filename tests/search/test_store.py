"""The store of a search: one key, one rule of dominance, and work that counts once."""

from __future__ import annotations

import importlib
import itertools
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autopar.errors import InfeasiblePlanError
from autopar.plan import PlanContent
from autopar.search import Job, alpa
from autopar.search.cache import PlanCache, cached
from autopar.search.mesh_search import MeshSearch
from autopar.search.outcome import Bounded
from autopar.search.pipeline.isomorphic_stages import StagePlanner
from autopar.search.problem_data import PlannedBy, key_of_plan, room_of
from autopar.search.store import Key, Room, Store
from autopar.solver.meter import Meter, Work
from autopar.solver.solution import Solution, Status
from tests.search.inter.test_tiny_steps import problem
from tests.search.problems import toy

KEY = Key("plan", "graph", ())
ROOMS = [Room(*of) for of in itertools.product((100.0, 200.0), (0, 1), (0, 1), (1.0, math.inf))]


@pytest.fixture(scope="module")
def content() -> PlanContent:
    """A stage of 60 bytes, of which a microbatch in flight holds 50 and another stage of the worker what lasts."""
    plan = alpa(problem(toy(1), layers=1)).content
    stage = msgspec.structs.replace(plan.stages[0], activation_bytes=50, state_bytes=30, accumulation_bytes=0)
    return msgspec.structs.replace(plan, stages=(stage,), peak_memory=60)


@pytest.mark.parametrize("found", ROOMS)
def test_nothing_in_a_room_is_nothing_in_a_smaller_one(found: Room) -> None:
    for value in (Bounded("slower"), InfeasiblePlanError("too large")):
        for asked in ROOMS:
            smaller = asked.limit_bytes <= found.limit_bytes and asked.cutoff_s <= found.cutoff_s
            smaller = smaller and asked.in_flight >= found.in_flight and asked.others >= found.others
            assert (
                found.answers(value, asked, any_that_fits=False)
                == found.answers(value, asked, any_that_fits=True)
                == smaller
            )


@pytest.mark.parametrize("found", ROOMS)
def test_an_answer_serves_the_smaller_rooms_that_hold_it(found: Room, content: PlanContent) -> None:
    for asked in ROOMS:
        fits = 60 + 50 * asked.in_flight + 30 * asked.others <= asked.limit_bytes
        smaller = asked.limit_bytes <= found.limit_bytes
        smaller = smaller and asked.in_flight >= found.in_flight and asked.others >= found.others
        assert found.answers(content, asked, any_that_fits=False) == (fits and smaller)
        assert found.answers(content, asked, any_that_fits=True) == fits


def test_any_that_fits_is_taken_from_those_that_the_taker_has(content: PlanContent) -> None:
    store, meter, tight, ample = Store(), Meter(), Room(120.0, 1), Room(500.0)
    store.planned(KEY, tight, meter, lambda _: content, "first")
    assert store.known(KEY, ample, meter, taker="first", any_that_fits=True) is content
    assert store.known(KEY, ample, meter, taker="second", any_that_fits=True) is None, "a better one may be there"
    assert store.known(KEY, tight, meter, taker="second") is content
    assert store.known(KEY, ample, meter, taker="second", any_that_fits=True) is content


def test_a_plan_of_a_smaller_room_serves_where_more_room_hardly_gains(content: PlanContent) -> None:
    """With 60 bytes at 2% more seconds in the smallest room, and 90 in the largest, which the one between lacks."""
    store, meter = Store(), Meter()
    small, between, large = Room(120.0), Room(121.0), Room(500.0)
    slower = msgspec.structs.replace(content, step_time=1.02)
    faster = msgspec.structs.replace(content, step_time=1.0, peak_memory=490)
    store.planned(KEY, small, meter, lambda _: slower, None)
    assert store.known(KEY, between, meter, gap=0.03) is None, "nothing is known of a larger room"
    store.planned(KEY, large, meter, lambda _: faster, None)
    assert store.known(KEY, between, meter, gap=0.01) is None
    assert store.known(KEY, between, meter, gap=0.03) is slower
    assert store.known(KEY, Room(59.0), meter, gap=0.03) is None, "it does not fit"


def test_an_error_is_kept() -> None:
    store, meter, made = Store(), Meter(), []

    def fails(own: Meter) -> PlanContent:
        made.append(own)
        raise InfeasiblePlanError("too large")

    with pytest.raises(InfeasiblePlanError, match="too large"):
        store.planned(KEY, Room(100.0), meter, fails, None)
    with pytest.raises(InfeasiblePlanError, match="too large"):
        store.known(KEY, Room(90.0), meter)
    assert store.known(KEY, Room(110.0), meter) is None and len(made) == 1


def test_a_stage_that_does_not_fit_is_planned_once() -> None:
    asked = []

    def intra(of: object) -> Bounded:
        asked.append(of)
        raise InfeasiblePlanError("too large")

    whole = problem(toy(1), layers=1)
    stage = replace(whole, job=Job(memory_limit_bytes=1000))
    for planner, limit in ((StagePlanner(intra), 1000), (StagePlanner(intra), 900)):
        with pytest.raises(InfeasiblePlanError):
            planner.plan(replace(stage, job=Job(memory_limit_bytes=limit)), "a stage")
    assert len(asked) == 1


def test_work_counts_once_for_all_who_ask() -> None:
    store, first, second = Store(), Meter(), Meter()

    def make(own: Meter) -> int:
        own.add(Work.CELLS, 7)
        return 3

    assert [store.counted(KEY, meter, make) for meter in (first, first, second)] == [3, 3, 3]
    assert first.total() == second.total() == {Work.CELLS: 7}
    first.merge(second)
    assert first.total() == {Work.CELLS: 7}


def test_a_solution_below_two_cutoffs_is_the_same_by_both() -> None:
    store, made = Store(), list[float]()

    def found(cutoff_s: float) -> Solution:
        def make(own: Meter) -> Solution:
            made.append(cutoff_s)
            own.add(Work.SWEPT, 5)
            bound = 2.0 if cutoff_s >= 2.0 else 1.5  # what exceeds the cutoff ends the search
            return Solution(Status.FEASIBLE, (0,), 3.0, bound, 0.0, "relaxation")

        return store.counted(KEY, meter, make, Room(cutoff_s=cutoff_s))

    meter = Meter()
    assert [found(cutoff_s).lower_bound for cutoff_s in (1.0, 4.0, math.inf, 2.5, 1.0, 1.2)] == [1.5, 2, 2, 2, 1.5, 1.5]
    assert made == [1.0, 4.0, 1.2]
    other = Meter()
    store.counted(KEY, other, lambda _: pytest.fail("made again"), Room(cutoff_s=3.0))
    assert other.total()[Work.SWEPT] == 5
    assert meter.total()[Work.SWEPT] == 15, "each that was given up counts, and the whole one once"


def test_a_key_has_everything_but_the_room() -> None:
    whole = problem(toy(2), layers=1)
    key = key_of_plan(whole)
    smaller = replace(whole, job=replace(whole.job, memory_limit_bytes=10))
    later = replace(whole, subproblem=replace(whole.subproblem, cutoff_s=1.0, extra_in_flight=2, other_stages=1))
    for other in (smaller, later):
        assert key_of_plan(other) == key and room_of(other) != room_of(whole)
    assert key_of_plan(replace(whole, cluster=toy(4))) != key
    assert key_of_plan(replace(whole, job=replace(whole.job, num_microbatches=2))) != key
    assert key_of_plan(replace(whole, graph=replace(whole.graph, name="another"))) != key
    assert key.text is not None and key.text == key_of_plan(replace(whole, store=Store())).text


def test_a_key_has_a_name_that_is_the_same_in_every_process() -> None:
    whole, cache = problem(toy(2), layers=1), PlanCache(Path("plans"))
    names = {key_of_plan(whole, PlannedBy(planner)).text for planner in (alpa, cached(alpa, cache))}
    assert len(names) == 1
    (name,) = names
    assert name is not None and "0x" not in name
    assert key_of_plan(whole, PlannedBy(lambda _: None)).text is None, "nobody knows what it does"


def test_what_was_asked_for_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        entries = 2

    monkeypatch.setattr("autopar.search.store._MOST_ENTRIES", 4)
    store, keys = Store(), [Key("large", str(n), ()) for n in range(3)]
    for key in (*keys[:2], keys[0], keys[2]):
        store.once(key, Large)
    assert list(store.answers) == [keys[0], keys[2]]


def test_a_key_asks_for_no_digest() -> None:
    """It is made of all conditions of a plan, and of use where an answer is kept."""

    class Conditions:
        digest = property(lambda _: pytest.fail("a digest is made for each question"))

    store, part = Store(), Conditions()
    assert store.key("plan", None, part, 3).of == (part, 3)
    assert list(store.parts) == [part]


def test_an_answer_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, measured = importlib.import_module("autopar.search.store"), []
    monkeypatch.setattr(module, "_numbers", lambda value: measured.append(value) or 1)
    store = Store()
    for n in range(20):
        store.once(Key("small", str(n), ()), lambda n=n: n)
    assert measured == list(range(20))


def test_a_mesh_is_stated_and_relaxed_once_whatever_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, states = importlib.import_module("autopar.search.mesh_search"), []
    plain = module.build
    monkeypatch.setattr(module, "build", lambda *a, **k: states.append(a[1]) or plain(*a, **k))
    whole = problem(toy(2), layers=1)
    for limit in (10**6, 10**5):
        meshes = MeshSearch(replace(whole, job=replace(whole.job, memory_limit_bytes=limit)))
        for mesh in meshes.meshes:
            stated = meshes.program(mesh)
            assert stated.problem.limit_bytes == limit
            assert meshes.free(stated) is meshes.free(stated)
    assert len(states) == len(set(states)) == len(MeshSearch(whole).meshes)
