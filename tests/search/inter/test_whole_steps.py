"""Equal stages: what they take in each number of microbatches by relaxations in one or two."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import LogicalMesh
from autopar.plan import StepForm
from autopar.schedule.zero_bubble import bubble_left
from autopar.search.pipeline.whole_steps import EqualStages, equal_stages
from examples import mlp
from tests.search.problems import toy
from tests.simulate.helpers import simulated

COUNTS = (1, 2, 4, 8, 16, 32, 64)
MESH = LogicalMesh((("x", 2),), ())
LEFT = bubble_left()


def _equal_stages(stages: int, *estimates: tuple[int, float]) -> EqualStages:
    return EqualStages(stages, (MESH,), estimates)


@pytest.mark.parametrize("v", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("stages", [2, 8])
def test_what_is_left_of_the_bubble_counts_in_every_number_of_microbatches(v: float, stages: int) -> None:
    """Seconds without the bubble are 1 + v m; of one microbatch twice as much of the bubble is left.

    Of several, two stages on each worker halve it.
    """
    equal = _equal_stages(stages, (1, 1 + v), (16, 1 + 16 * v))
    others = stages - 1

    def seconds(m: int) -> float:
        left = LEFT * (2 - min(1.0, (m - 1) / others))
        return (1 + v * m) * (1 + left * others / m / (2 if m > 1 else 1))

    assert [equal.busy_s(m) for m in COUNTS] == pytest.approx([1 + v * m for m in COUNTS])
    assert equal.least_s(COUNTS, LEFT) == pytest.approx(min(map(seconds, COUNTS)))
    assert equal.least_s([1], LEFT) == pytest.approx((1 + v) * (1 + 2 * LEFT * others))


def test_one_relaxation_says_that_more_microbatches_gain_the_bubble_alone() -> None:
    assert _equal_stages(4, (8, 1.0)).least_s(COUNTS, LEFT) == pytest.approx(1 + LEFT * 3 / 64 / 2)


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (2, 16), (3, 8), (4, 2), (4, 32), (8, 16)])
def test_the_estimate_is_what_eager_1f1b_takes_and_no_schedule_takes_less_than_the_least(
    stages: int, count: int, sent: float
) -> None:
    """Equal stages by the simulator: a forward pass takes 1, a backward pass 2, a message in one direction ``sent``."""
    equal = EqualStages(stages, (MESH,), ((count, 3.0 * count),), sends=((sent / 2, sent * count / 2),) * (stages - 1))
    eager = float(simulated("eager-1f1b", stages, count, transfer=sent).step_time)
    assert equal.step_s(count) == pytest.approx(eager, rel=0.13)
    others = [simulated(f"zb-h{n}", stages, count, 1, 1, 1, sent).step_time for n in (1, 2)]
    assert equal.least_s([count], LEFT) <= 1.001 * min(eager, *map(float, others))


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (2, 16), (3, 8), (4, 2), (4, 4), (4, 32), (8, 16)])
def test_with_ample_memory_the_estimate_is_what_the_fastest_schedule_takes(
    stages: int, count: int, sent: float
) -> None:
    """Passes that compute gradients of inputs and of weights take 1 each, as the forward pass does."""
    sends = ((sent / 2, sent * count / 2),) * (stages - 1)
    equal = EqualStages(stages, (MESH,), ((count, 3.0 * count),), sends=sends, bubble_left=LEFT)
    eager = float(simulated("eager-1f1b", stages, count, transfer=sent).step_time)
    others = [float(simulated(f"zb-h{n}", stages, count, 1, 1, 1, sent).step_time) for n in (1, 2)]
    assert equal.step_s(count) == pytest.approx(min(eager, *others), rel=0.12)


def test_stages_on_each_worker_divide_the_bubble() -> None:
    assert _equal_stages(5, (8, 1.0)).step_s(8) == 1.5
    assert _equal_stages(5, (8, 1.0)).step_s(8, chunks=2, uneven=1.1) == pytest.approx(1.1 * 1.25)


def test_a_relaxation_that_takes_too_long_says_so_and_counts_as_what_is_of_use() -> None:
    fn, args = mlp.build(abstract=True, layers=8, hidden=32, batch=64)
    function = PureFunction(fn, ParallelOptions(cluster=toy(8)))
    traced, _ = function.plan(function.resolve(args, {})[0])
    problem, step = function.searched(traced, None)
    two = EqualStages.of(problem, 2)
    found = equal_stages(problem, step, two, StepForm(1), 1e9)
    assert found is not None and 0 < found.busy_s(1) < 1e9 and not found.is_beyond
    least_s = found.busy_s(1) / 2
    beyond = equal_stages(problem, step, two, StepForm(1), least_s)
    assert beyond is not None and beyond.is_beyond and beyond.busy_s(1) == least_s
    assert found.bubble_left == LEFT, "memory is ample"
    short = replace(problem, job=replace(problem.job, memory_limit_bytes=10_000))
    limited = equal_stages(short, step, two, StepForm(1), 1e9)
    assert limited is not None and limited.bubble_left == 1.0
    both = equal_stages(problem, step, found, StepForm(4), 1e9)
    assert both is not None and [m for m, _ in both.estimates] == [1, 4] and both.meshes == found.meshes
    assert both.beyond == math.inf and both.within(COUNTS) == list(COUNTS)
    longer = equal_stages(problem, step, found, StepForm(16), 0.79 * found.busy_s(1))
    assert longer is not None and longer.estimates == found.estimates, "seconds of the cutoff are no estimate"
    assert not longer.is_beyond and longer.bubble_left == LEFT and longer.within(COUNTS) == [1, 2, 4, 8]
    assert equal_stages(problem, step, two, StepForm(3), 1e9) is None, "64 examples are not three equal parts"


def test_meshes_of_a_stage_that_are_like_the_mesh_of_one_stage_are_relaxed_too() -> None:
    """Of a perceptron on 512 devices one stage is fastest on (16, 32), and half of it on (16, 16)."""
    fn, args = mlp.build(abstract=True, layers=8, hidden=32, batch=64)
    function = PureFunction(fn, ParallelOptions(cluster=autopar.Cluster.load("t4", nodes=128)))
    traced, _ = function.plan(function.resolve(args, {})[0])
    problem, _ = function.searched(traced, None)
    likeliest, more = (EqualStages.of(problem, 2, like).meshes for like in ((), (16, 32)))
    assert [m.shape for m in more[len(likeliest) :]] == [(8, 32), (16, 16)][-len(more) + len(likeliest) :]
    assert set(likeliest) < set(more)


def test_stages_update_at_once_and_fill_no_bubble_that_costs_more_to_fill() -> None:
    equal = EqualStages(5, (MESH,), ((8, 1.0),), update_s=0.2)
    assert equal.step_s(8) == pytest.approx(0.2 + 0.8 * 1.5)
    filled = replace(equal, bubble_left=LEFT)
    assert filled.step_s(8) == pytest.approx(0.2 + 0.8 * (1 + LEFT * 0.5))
    assert replace(filled, start_s=0.03).step_s(8) == filled.step_s(8), "8 programs take 0.24 to start, they save 0.27"
    assert replace(filled, start_s=0.04).step_s(8) == equal.step_s(8)
