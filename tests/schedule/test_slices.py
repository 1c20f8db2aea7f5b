"""Slices of a sequence: the dynamic program against all cuts, and against published points."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.schedule.slices import pass_seconds, slice_lengths

#: Seconds a step of GPT-3 in uniform slices (TeraPipe, Li et al., 2021; 96 and 48 stages), and of the paper's own cut.
GPT_175B, BEST_175B = {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252}, 1.481
GPT_44B, BEST_44B = {1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241}, 1.111


def cuts(units):
    for marks in itertools.product((False, True), repeat=units - 1):
        ends = [i + 1 for i, m in enumerate(marks) if m] + [units]
        yield tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("stages", [1, 2, 4, 16])
def test_equals_all_cuts(stages):
    for seed in range(20):
        drawn = random.Random(seed)
        table = {(k, c): drawn.uniform(0.1, 1) + k * drawn.uniform(0, 1) for k in range(1, 9) for c in range(9)}

        def seconds(length, before, table=table):
            return table[length // 4, before // 4]

        best = min(pass_seconds(tuple(4 * k for k in cut), stages, seconds) for cut in cuts(8))
        found = slice_lengths(32, stages, seconds, unit=4)
        assert found.seconds == pytest.approx(best, rel=1e-12)
        assert sum(found.lengths) == 32 and pass_seconds(found.lengths, stages, seconds) == found.seconds
        near = slice_lengths(32, stages, seconds, unit=4, tolerance_s=0.05)
        assert best - 1e-12 <= near.seconds <= best + stages * 0.05 + 1e-12


def test_later_slices_are_shorter_where_attention_costs():
    found = slice_lengths(64, 8, lambda length, before: length * (1 + before / 16), unit=4)
    assert len(found.lengths) > 1 and found.lengths[0] > found.lengths[-1]
    assert list(found.lengths) == sorted(found.lengths, reverse=True)


def interpolated(points, stages, tokens=2048):
    """t(l), linear between what the uniform points say of it: ``T = (M + K - 1) t(tokens / M)``."""
    lengths = [tokens // count for count in points][::-1]
    times = [total / (count + stages - 1) for count, total in points.items()][::-1]
    return lambda length, before: float(np.interp(length, lengths, times))


@pytest.mark.parametrize(
    ("points", "stages", "best"), [(GPT_175B, 96, BEST_175B), (GPT_44B, 48, BEST_44B)], ids=["175B", "44B"]
)
def test_published_points(points, stages, best):
    """Of the uniform points alone follows how much faster the best cut is: within 20% of what the paper measured."""
    seconds = interpolated(points, stages)
    for count, total in points.items():
        assert pass_seconds((2048 // count,) * count, stages, seconds) == pytest.approx(total, rel=1e-9)
    found = slice_lengths(2048, stages, seconds, unit=16, tolerance_s=1e-5)
    assert found.seconds <= min(points.values()) * 1.001
    assert points[1] / found.seconds == pytest.approx(points[1] / best, rel=0.2)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ScheduleError, match="10 tokens are not a multiple of 8"):
        slice_lengths(10, 2, lambda length, before: 1.0)
