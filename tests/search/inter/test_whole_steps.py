"""Equal stages: what they take in each number of microbatches by looks in one or two."""

from __future__ import annotations

import pytest

from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import LogicalMesh
from autopar.search.enumeration.whole_steps import EqualStages, equal_stages
from autopar.search.policy import SearchPolicy
from examples import mlp
from tests.search.problems import toy

COUNTS = (1, 2, 4, 8, 16, 32, 64)
MESH = LogicalMesh((("x", 2),), ())
LEFT = SearchPolicy().schedules.bubble_left


def _looks(stages: int, *looked: tuple[int, float], is_beyond: bool = False) -> EqualStages:
    return EqualStages(stages, looked, MESH, is_beyond=is_beyond)


@pytest.mark.parametrize("v", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("stages", [2, 8])
def test_what_is_left_of_the_bubble_counts_in_every_number_of_microbatches(v: float, stages: int) -> None:
    """Seconds without the bubble are 1 + v m; of one microbatch twice as much of the bubble is left."""
    looks = _looks(stages, (1, 1 + v), (16, 1 + 16 * v))
    others = stages - 1

    def seconds(m: int) -> float:
        left = LEFT * (2 - min(1.0, (m - 1) / others))
        return (1 + v * m) * (1 + left * others / m)

    assert [looks.busy_s(m) for m in COUNTS] == pytest.approx([1 + v * m for m in COUNTS])
    assert looks.least_s(COUNTS, LEFT) == pytest.approx(min(map(seconds, COUNTS)))
    assert looks.least_s([1], LEFT) == pytest.approx((1 + v) * (1 + 2 * LEFT * others))


def test_one_look_says_that_more_microbatches_gain_the_bubble_alone() -> None:
    assert _looks(4, (8, 1.0)).least_s(COUNTS, LEFT) == pytest.approx(1 + LEFT * 3 / 64)


def test_stages_on_each_worker_divide_the_bubble() -> None:
    assert _looks(5, (8, 1.0)).step_s(8) == 1.5
    assert _looks(5, (8, 1.0)).step_s(8, chunks=2, uneven=1.1) == pytest.approx(1.1 * 1.25)


def test_a_look_that_takes_too_long_says_so_and_counts_as_what_is_of_use() -> None:
    fn, args = mlp.build(abstract=True, layers=8, hidden=32, batch=64)
    function = PureFunction(fn, ParallelOptions(cluster=toy(8)))
    traced, _ = function.plan(function.resolve(args, {})[0])
    problem, step = function.searched(traced, None)
    found = equal_stages(problem, step, 2, 1, 1e9)
    assert found is not None and 0 < found.busy_s(1) < 1e9 and not found.is_beyond
    least_s = found.busy_s(1) / 2
    beyond = equal_stages(problem, step, 2, 1, least_s)
    assert beyond is not None and beyond.is_beyond and beyond.busy_s(1) == least_s
    both = equal_stages(problem, step, 2, 4, 1e9, found)
    assert both is not None and [m for m, _ in both.looked] == [1, 4] and both.mesh == found.mesh
    assert equal_stages(problem, step, 2, 3, 1e9) is None, "64 examples are not three equal parts"
