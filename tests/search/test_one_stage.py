"""Which of the ways of one stage is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from msgspec import structs

import autopar
from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.plan import StepForm
from autopar.search.decision import Decision
from autopar.search.loop import Known
from autopar.search.one_stage import OneStagePlanner, StageForms, one_stage, with_padding
from autopar.search.outcome import Bounded
from autopar.search.trials import Trials
from examples import gpt

COUNTS = (1, 2, 4)


@dataclass
class Step:
    """A step that needs ``bytes`` in one microbatch, with nothing recomputed.

    Each doubling takes off a quarter, each level a third; a doubling costs a tenth of a second and a level a quarter.
    What hardly fits takes a second longer. Nothing lies in host memory but where less than ``on_devices`` would do.
    """

    limit_bytes: float
    bytes: float = 100.0
    on_devices: float = 0.0
    tried: list[tuple[int, str]] = field(default_factory=list)
    updated: list[tuple[int, str]] = field(default_factory=list)
    enough: list[float] = field(default_factory=list)

    def attempt(self, configuration, cutoff_s, explain):
        count, level = configuration.microbatches, configuration.remat
        self.tried.append((count, level))
        if configuration.host_update:
            self.updated.append((count, level))
        self.enough.append(cutoff_s)
        if count > 2 * self.bytes:
            raise MicrobatchError(f"{count} microbatches")
        doublings, levels = count.bit_length() - 1, ("none", "selective", "full").index(level)
        needed = self.bytes * 0.75**doublings * (2 / 3) ** levels
        if needed > self.limit_bytes:
            raise InfeasiblePlanError(f"{needed} bytes", least_bytes=int(needed))
        tight = needed > 0.9 * self.limit_bytes
        stage = SimpleNamespace(host_bytes=needed < self.on_devices, form=configuration)
        seconds = 1.0 + 0.1 * doublings + 0.25 * levels + tight
        content = SimpleNamespace(memory_bound=tight, search=SimpleNamespace(unlimited_s=None))
        return SimpleNamespace(
            way=(count, level), num_microbatches=count, stages=[stage], content=content, step_time=seconds
        )

    def chosen(self, counts=COUNTS, remat="auto", offload=False, tiny=False, host_update=False, relaxations=None):
        relaxations = Trials(relaxations or replace(self, tried=[], enough=[]).attempt) if tiny else None
        trials = Trials(self.attempt)
        forms = StageForms(counts, remat, offload=offload, host_update=host_update)
        return one_stage(trials, forms, relaxations=relaxations).way


def test_what_fits_at_once_is_taken():
    step = Step(limit_bytes=105)
    assert step.chosen() == (1, "none")
    assert step.tried == [(1, "none")]


def test_hosts_update_where_nothing_fits_on_devices_alone():
    step = Step(limit_bytes=105, on_devices=1000.0)
    step.chosen(offload=True, host_update=True)
    assert len(step.updated) == 9 and step.tried[9:] == step.updated
    free = Step(limit_bytes=105)
    assert free.chosen(offload=True, host_update=True) == (1, "none") and not free.updated


def test_the_fewest_microbatches_that_fit_come_before_computing_anew():
    step = Step(limit_bytes=60)
    assert step.chosen() == (4, "none")
    assert step.tried == [(1, "none"), (2, "none"), (4, "none")]


def test_where_none_does_as_little_as_must_be_is_computed_anew():
    step = Step(limit_bytes=40)
    assert step.chosen() == (4, "selective")
    assert step.tried[3] == (4, "full"), "what holds least says whether anything fits"


def test_segments_may_take_less_than_the_fewest_microbatches_that_keep_what_layers_store():
    """Four microbatches take longer than a plan that is known, and one in segments of one layer does not."""
    tried = []

    def attempt(form: StepForm, cutoff_s: float, explain: bool) -> object:
        tried.append((form.microbatches, form.segment_layers))
        if form.microbatches < 4 and not form.segment_layers:
            raise InfeasiblePlanError("too large", least_bytes=2)
        seconds = 1.25 if form.segment_layers else 2.0
        content = SimpleNamespace(memory_bound=False, search=SimpleNamespace(unlimited_s=None))
        plan = SimpleNamespace(
            num_microbatches=form.microbatches, stages=[SimpleNamespace(form=form)], content=content, step_time=seconds
        )
        return plan if seconds < cutoff_s else Bounded("a bound", seconds)

    forms = StageForms(COUNTS, stored_from=4, may_fit=lambda counts: counts[-1:], segments=lambda: (1, 2))
    for cutoff_s in (math.inf, 3.0, 1.5):
        tried.clear()
        plan = one_stage(Trials(attempt), forms, cutoff_s=cutoff_s)
        assert plan.stages[0].form == StepForm(segment_layers=1)
        assert tried == [(4, 0), (1, 1)], "what is known not to fit is left out"
    assert one_stage(Trials(attempt), forms, cutoff_s=1.2) == Bounded("a bound", 1.25)


@pytest.mark.parametrize(("seconds", "tries"), [(1.25, False), (1.35, True)])
def test_segments_are_tried_where_the_limit_costs_as_much_as_the_forward_pass_again(seconds: float, tries: bool):
    """One microbatch takes a second without the limit; the forward pass is 0.3 of it."""
    tried = []

    def attempt(form: StepForm, cutoff_s: float, explain: bool) -> object:
        tried.append(form.segment_layers)
        content = SimpleNamespace(memory_bound=not form.segment_layers, search=SimpleNamespace(unlimited_s=1.0))
        took = 1.3 if form.segment_layers else seconds
        stages = [SimpleNamespace(form=form)]
        return SimpleNamespace(num_microbatches=1, stages=stages, content=content, step_time=took)

    forms = StageForms((1,), segments=lambda: (1,), forward_share=lambda: 0.3)
    plan = one_stage(Trials(attempt), forms)
    assert tried == ([0, 1] if tries else [0])
    assert plan.step_time == min(seconds, 1.3)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [4_000_000_000, 8_000_000_000, 16_000_000_000])
def test_a_cutoff_that_the_best_plan_keeps_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """In 4 and 8 GB eight microbatches take a third longer than one in segments, by which one stage is ranked."""
    searched, best = [], OneStagePlanner.best

    def note(self: OneStagePlanner, cutoff_s: float = math.inf) -> object:
        searched.append(self)
        return best(self, cutoff_s)

    monkeypatch.setattr(OneStagePlanner, "best", note)
    sizes = {"layers": 4, "hidden": 1024, "heads": 8, "batch": 256, "seq": 1024, "vocab": 512, "scan": True}
    step, args = gpt.build("1.3B", abstract=True, **sizes)
    options = {"cluster": autopar.Cluster.load("dgx-a100"), "memory_limit": memory, "num_stages": 1}
    plan = autopar.parallelize(step, donate_argnums=0, **options).plan(*args)
    assert best(searched[0], 1.05 * plan.step_time).step_time == plan.step_time
    one = searched[0]
    decision = Decision(one.problem, one.step, one.counts, one.strategy, one.cache)
    known = Known(replace(plan, content=structs.replace(plan.content, step_time=1.1 * plan.step_time)))
    (region,) = decision._by_microbatches(0.0, known).regions
    assert region.expected_s <= 1.05 * plan.step_time


def test_a_tiny_step_takes_the_fastest_of_all_ways():
    step = Step(limit_bytes=76)
    assert step.chosen() == (2, "none"), "which hardly fits"
    step.tried.clear()
    step.enough.clear()
    assert step.chosen(tiny=True) == (4, "none")
    assert step.tried[:3] == [(4, "none"), (1, "selective"), (2, "selective")]
    assert step.tried[-1] == (1, "none"), "which has no look"
    # What takes longer than the fastest so far need not be planned.
    assert step.enough == [math.inf, *[1.2] * (len(step.tried) - 1)]


def test_a_tiny_step_is_planned_first_as_a_relaxation_at_it_is_fastest():
    """Looks take longer than plans, each by another share: all that they see is planned, in their order."""
    step, seen = Step(limit_bytes=60), Step(limit_bytes=60)

    def relaxed(configuration, cutoff_s, explain):
        plan = seen.attempt(configuration, cutoff_s, explain)
        plan.step_time *= 1 + 1 / (1 + configuration.count)
        return plan

    assert step.chosen(tiny=True, relaxations=relaxed) == Step(limit_bytes=60).chosen(tiny=True)
    assert set(step.tried) == set(seen.tried)
    assert step.tried.index((4, "selective")) < step.tried.index((2, "selective")) < step.tried.index((1, "none"))
    assert step.enough[0] == math.inf > step.enough[1]


def test_padding_keeps_all_else_of_the_form():
    """Also updates in the backward loop, which are not padded today."""
    form = StepForm(2, "full", ("end",), 4, 64, backward_update=True, host_update=True, slices_ahead=1)
    plan, asked = SimpleNamespace(stages=[SimpleNamespace(form=form)], step_time=2.0), []

    def attempt(form, cutoff_s, explain):
        asked.append(form)
        return SimpleNamespace(stages=[SimpleNamespace(form=form)], step_time=1.0)

    dims = (("w", 0, 8),)
    assert with_padding(Trials(attempt), plan, [dims]).step_time == 1.0
    assert asked == [StepForm(2, "full", None, 4, 64, backward_update=True, host_update=True, padded=dims)]


def test_relaxations_end_where_the_limit_has_no_part():
    step, seen = Step(limit_bytes=200), Step(limit_bytes=200)
    assert step.chosen(tiny=True, relaxations=seen.attempt) == (1, "none")
    assert step.tried == seen.tried == [(1, "none")]


def test_a_tiny_step_that_the_limit_has_no_part_in_has_one_way():
    step = Step(limit_bytes=1000)
    assert step.chosen(tiny=True) == (1, "none")
    assert step.tried == [(1, "none")]


def test_with_host_memory_the_first_that_needs_none_is_the_last_tried():
    step = Step(limit_bytes=80, on_devices=60)
    assert step.chosen(offload=True) == (2, "none")
    assert step.tried == [(1, "none"), (2, "none")]


@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("tiny", [False, True])
def test_what_is_asked_for_is_taken(level, tiny):
    step = Step(limit_bytes=60)
    assert step.chosen(remat=level, tiny=tiny)[1] == level
    assert {tried for _, tried in step.tried} == {level}


@pytest.mark.parametrize("tiny", [False, True])
def test_where_nothing_fits_the_nearest_is_told(tiny):
    with pytest.raises(InfeasiblePlanError, match="with remat='full'"):
        Step(limit_bytes=1).chosen(tiny=tiny)
    with pytest.raises(MicrobatchError):
        Step(limit_bytes=1).chosen(counts=(1024,), tiny=tiny)
