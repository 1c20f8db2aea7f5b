"""Bubbles and activations in flight of equal stages are those of the papers, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule import get
from autopar.schedule.zero_bubble import bubble_left
from tests.simulate.helpers import simulated

WORKERS = st.integers(1, 8)
#: Exact numbers: binary fractions of a second and thirds do not add up in floats.
TIMES = st.fractions(Fraction(1, 3), 3, max_denominator=7)


def share(idle, timeline):
    return Fraction(idle) / timeline.step_time


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@settings(max_examples=15)
@given(p=WORKERS, m=st.integers(1, 16), forward=TIMES)
def test_flushing_schedules(name, p, m, forward):
    timeline = simulated(name, p, m, forward, 2 * forward)
    assert timeline.bubble_fraction == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(max_examples=15)
@given(p=WORKERS, m=st.integers(1, 16), forward=TIMES, backward=TIMES)
def test_flushing_schedules_with_any_backward(name, p, m, forward, backward):
    assert simulated(name, p, m, forward, backward).bubble_fraction == Fraction(p - 1, m + p - 1)


@settings(max_examples=15)
@given(p=WORKERS, m=st.integers(1, 16), forward=TIMES)
def test_inference(p, m, forward):
    assert simulated("inference", p, m, forward).bubble_fraction == Fraction(p - 1, m + p - 1)


@settings(max_examples=12)
@given(p=st.integers(1, 6), groups=st.integers(1, 4), v=st.integers(2, 4), forward=TIMES)
def test_interleaved(p, groups, v, forward):
    m = p * groups
    timeline = simulated("interleaved", p, m, forward, 2 * forward, chunks=v)
    assert timeline.bubble_fraction == Fraction(p - 1, v * m + p - 1)


@settings(max_examples=15)
@given(p=WORKERS, more=st.integers(0, 10), weight=TIMES, data=st.data())
def test_zb_h1_idles_on_every_worker(p, more, weight, data):
    forward, backward = (weight + data.draw(TIMES) - Fraction(1, 3) for _ in range(2))
    m = p + more
    timeline = simulated("zb-h1", p, m, forward, backward, weight)
    assert timeline.step_time == m * (forward + backward + weight) + (p - 1) * (forward + backward - weight)
    assert [timeline.idle_s(w) for w in range(p)] == [(p - 1) * (forward + backward - weight)] * p


@settings(max_examples=15)
@given(p=WORKERS, more=st.integers(0, 10), weight=TIMES, data=st.data())
def test_zb_h2_waits_on_the_worst_worker(p, more, weight, data):
    forward, backward = (weight + data.draw(TIMES) - Fraction(1, 3) for _ in range(2))
    timeline = simulated("zb-h2", p, 2 * p - 1 + more, forward, backward, weight)
    assert max(timeline.bubble_s(w) for w in range(p)) == (p - 1) * (forward + backward - 2 * weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@settings(max_examples=15)
@given(p=WORKERS, more=st.integers(0, 10), time=TIMES)
def test_zero_bubble(name, p, more, time):
    timeline = simulated(name, p, 2 * p - 1 + more, time, time, time)
    assert [timeline.bubble_s(w) for w in range(p)] == [0] * p


@settings(max_examples=15)
@given(half=st.integers(1, 4), units=st.integers(1, 3), time=TIMES)
def test_chimera(half, units, time):
    p = 2 * half
    m = p * units
    assert simulated("chimera", p, m, time, time).bubble_fraction == Fraction(p - 2, 2 * m + p - 2)


def test_schedules_in_their_order_of_merit():
    """Four workers, eight microbatches, F = B = W: what the papers say is better is better."""
    whole = {n: simulated(n, 4, 8, 1, 2).step_time for n in ("gpipe", "1f1b", "eager-1f1b")}
    assert set(whole.values()) == {33}
    # A chunk of two takes half as long.
    assert simulated("interleaved", 4, 8, Fraction(1, 2), 1).step_time == Fraction(57, 2)
    assert simulated("zb-h1", 4, 8, 1, 1, 1).step_time == 27
    half = Fraction(1, 2)
    assert simulated("zb-v", 4, 8, half, half, half).step_time == Fraction(51, 2)


@pytest.mark.parametrize("p", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16])
def test_activations_in_flight(p, m):
    def live_bytes(name, **options):
        schedule = get(name, **options)
        return schedule.in_flight(p * schedule.chunks, m)

    assert live_bytes("gpipe") == (m,) * p
    assert live_bytes("1f1b") == tuple(min(m, p - i) for i in range(p))
    assert live_bytes("eager-1f1b") == tuple(min(m, 2 * (p - i) - 1) for i in range(p))
    assert live_bytes("zb-h1") == (min(m, p),) * p
    assert max(live_bytes("zb-h2")) == min(m, 2 * p - 1)
    if m >= 2 * p - 1:
        assert live_bytes("zb-h2") == (2 * p - 1,) * p
        assert live_bytes("zb-v") == (2 * p,) * p
    assert max(live_bytes("zb-v")) <= 2 * min(m, p)
    if m % p == 0:
        for v in (2, 3):
            expected = tuple(min(v * m, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in range(p))
            assert live_bytes("interleaved", chunks=v) == expected
    if p % 2 == 0 and m >= p:
        assert live_bytes("chimera") == tuple(p // 2 + 1 + min(i, p - 1 - i) for i in range(p))
    assert live_bytes("inference") == (1,) * p


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
def test_zb_h1_leaves_the_share_that_is_said(
    workers: int, microbatches: int, forward: int, backward: int, weight: int
) -> None:
    each = forward + backward + weight
    plain = simulated("1f1b", workers, microbatches, forward, backward + weight)
    filled = simulated("zb-h1", workers, microbatches, forward, backward, weight)
    bubbles = [line.step_time - microbatches * each for line in (filled, plain)]
    assert bubbles[0] / bubbles[1] == pytest.approx(bubble_left(forward, backward, weight))
