"""Moves to hosts and back run in parallel with computing; where they take longer they are what the step takes."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import pytest

from autopar.schedule import NONE, build, chain, get
from autopar.simulate import Durations, run
from autopar.simulate.durations import equal_stages

SECONDS = {"forward": Fraction(1), "backward": Fraction(2), "weight": Fraction(1)}


def timed(host_s, workers=4, microbatches=8, name="1f1b", only=None):
    """A step in which what ``forward`` keeps waits in host memory, each move taking ``host_s``."""
    table = get(name).table(workers, microbatches)
    flow = chain(table)
    kept = {n for w in flow.works if w.work.kind == "forward" for n in w.writes} & {
        n for w in flow.works if w.work.kind == "backward" for n in w.reads
    }
    kept = {n for n in kept if flow.writers[n].kind == "forward" and (only is None or n in only)}
    values = tuple(dataclasses.replace(v, host=v.name in kept and not v.is_input) for v in flow.values)
    flow = dataclasses.replace(flow, values=values)
    durations: Durations = dataclasses.replace(
        equal_stages(table, flow, SECONDS), host_s=dict.fromkeys(kept, Fraction(host_s))
    )
    return run(build(table, flow), durations)


def host_events(timeline, worker):
    return [e for e in timeline.events if e.worker == worker and e.kind == "send" and "host" in e.name]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_short_moves_take_no_time(name):
    assert timed(Fraction(1, 4), name=name).step_time == timed(0, name=name).step_time
    assert host_events(timed(Fraction(1, 4), name=name), 0)


def test_moves_of_a_worker_follow_each_other():
    events = host_events(timed(Fraction(1, 2)), 0)
    assert len(events) >= 8
    for a, b in itertools.pairwise(events):
        assert a.end_s <= b.start_s
    assert all(e.target == NONE for e in events)


def test_long_moves_are_what_the_step_takes():
    quick, slow = timed(0), timed(4)
    moves = host_events(slow, 0)
    # Every microbatch that leaves comes back: as many moves as that, one after the other.
    assert slow.step_time >= sum(e.end_s - e.start_s for e in moves) > quick.step_time
    assert timed(8).step_time > slow.step_time


def test_a_microbatch_leaves_when_the_one_before_is_gone():
    """The third forward pass waits for the first microbatch to be gone, so that no more than one is on its way."""
    slow = timed(10)
    forwards = [e for e in slow.events if e.worker == 0 and e.kind == "forward"]
    leaving = [e for e in host_events(slow, 0) if "to the host" in e.name]
    assert forwards[2].start_s >= leaving[0].end_s
