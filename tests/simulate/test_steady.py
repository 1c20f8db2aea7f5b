"""The steady state of pipelines without a flush."""

from __future__ import annotations

import pytest

from autopar.plan import Memory, Stage
from autopar.schedule import Work, chain, get
from autopar.simulate import Durations, steady
from autopar.simulate.memory import memory_of_tasks


def shape(name, stages, m, seconds, update=0.0, transfer=0.0):
    table = get(name).table(stages, m)
    dataflow = chain(table, parameter_bytes=10)
    work_s = {}
    for s in range(stages):
        work_s |= {Work("forward", s): seconds[s], Work("backward", s): 2 * seconds[s], Work("update", s): update}
    return steady(table, dataflow, Durations(work_s, {}, transfer))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize(("stages", "m"), [(2, 2), (3, 8), (5, 5), (8, 16)])
def test_equal_stages_never_wait(name, stages, m):
    timeline = shape(name, stages, m, [1.0] * stages)
    assert timeline.step_time == pytest.approx(3 * m)
    assert timeline.bubble_fraction == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_a_call_takes_as_long_as_the_slowest_stage(name):
    timeline = shape(name, 4, 8, [1.0, 1.5, 1.25, 0.5])
    assert timeline.step_time == pytest.approx(3 * 1.5 * 8)
    assert timeline.busy_s(3) == pytest.approx(3 * 0.5 * 8)


def test_pipedream_updates_after_every_microbatch_and_2bw_after_all():
    assert shape("pipedream", 2, 4, [1.0, 1.0], update=0.5).step_time == pytest.approx(4 * 3.5)
    assert shape("2bw", 2, 4, [1.0, 1.0], update=0.5).step_time == pytest.approx(4 * 3 + 0.5)


def test_memory_has_the_versions():
    memory = Memory(parameters=10, gradients=10, activations=5)
    stages = dict.fromkeys(range(4), Stage((), (0,), (), 0.0, 0.0, memory))

    def peaks(name):
        table = get(name).table(4, 8)
        return [max(t.during_bytes for t in memory_of_tasks(stages, table, w)) for w in range(4)]

    flushed = peaks("1f1b")
    assert [a - b for a, b in zip(peaks("pipedream"), flushed, strict=True)] == [30, 20, 10, 0]
    assert [a - b for a, b in zip(peaks("pipedream-vertical"), flushed, strict=True)] == [30] * 4
    assert [a - b for a, b in zip(peaks("2bw"), flushed, strict=True)] == [10] * 4
