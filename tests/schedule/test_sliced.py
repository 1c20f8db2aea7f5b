"""Schedules in slices of tokens: which take them, order, memory, and how long they take."""

from __future__ import annotations

from itertools import accumulate

import pytest

from autopar.errors import ScheduleError
from autopar.schedule import build, check_table, get, parse_table, schedules, to_csv, to_json, to_text, verify, work_of
from autopar.schedule.slices import WITHOUT_SLICES, pass_seconds, slice_lengths, with_slices
from autopar.simulate import Durations, equal_stages, run
from tests.schedule.chains import chain_of_slices
from tests.schedule.test_slices import BEST_44B, GPT_44B, interpolated

TAKING = sorted(set(schedules()) - {*WITHOUT_SLICES, "table"})
UNITS = {"forward": 1, "backward": 2, "weight": 1}


@pytest.mark.parametrize("schedule", TAKING)
@pytest.mark.parametrize(("stages", "microbatches", "slices"), [(4, 8, 3), (2, 4, 2), (4, 4, 1)])
def test_every_schedule_runs_in_slices(schedule, stages, microbatches, slices):
    table = with_slices(get(schedule).table(stages, microbatches), slices)
    assert check_table(table) is table
    assert table == parse_table(to_text(table)) == parse_table(to_csv(table)) == parse_table(to_json(table))
    program = build(table, chain_of_slices(table, activation_bytes=3, boundary_bytes=2, kept_bytes=1))
    verify(program)
    for row in table.rows:
        order = {t: n for n, t in enumerate(row)}
        for t in row:
            assert all(order[n] < order[t] for n in table.needs(t) if n in order)


@pytest.mark.parametrize("schedule", sorted(set(WITHOUT_SLICES) - {"ampnet"}))
def test_others_say_which_do(schedule):
    with pytest.raises(ScheduleError, match=f"{schedule} takes no slices of tokens(.|\n)*gpipe, 1f1b, eager-1f1b"):
        with_slices(get(schedule).table(2, 4), 2)


def test_what_has_slices_is_not_cut_again():
    table = with_slices(get("gpipe").table(2, 2), 2)
    with pytest.raises(ScheduleError, match="with 2 slices was to be cut into 2"):
        with_slices(table, 2)


def test_tables_that_do_not_keep_the_order_of_slices():
    text = "0 | F0.0 F0.0/1 B0.0 B0.0/1"
    with pytest.raises(ScheduleError, match=r"never ends(.|\n)*>B0.0<"):
        check_table(parse_table(text))
    assert check_table(parse_table("0 | F0.0 F0.0/1 B0.0/1 B0.0")).num_slices == 2
    with pytest.raises(ScheduleError, match=r"B0.0/1 is missing(.|\n)*microbatch 0, slice 1"):
        check_table(parse_table("0 | F0.0 F0.0/1 B0.0"))


def timed(table, seconds):
    """The step where slice k of a pass of kind "forward" takes ``seconds[k]``, twice that backward."""
    flow = chain_of_slices(table)
    work_s = dict.fromkeys((s.work for s in flow.works), 0)
    work_s |= {work_of(t): seconds[t.slice] * UNITS[t.kind] for row in table.rows for t in row}
    return run(build(table, flow), Durations(work_s))


@pytest.mark.parametrize(("stages", "seconds"), [(4, [3, 3, 3]), (3, [5, 4, 2, 1]), (2, [1, 6, 2])])
def test_one_microbatch_of_gpipe_takes_what_the_paper_says(stages, seconds):
    """Equation 5: T = sum t_i + (K - 1) max t_i, here of forward and backward pass together."""
    table = with_slices(get("gpipe").table(stages, 1), len(seconds))
    assert timed(table, seconds).step_time == 3 * (sum(seconds) + (stages - 1) * max(seconds))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_slices_shrink_the_bubble(schedule):
    whole = get(schedule).table(4, 4)
    steps = []
    for slices in (1, 2, 4):
        table = with_slices(whole, slices)
        steps.append(timed(table, [12 // slices] * slices).step_time)
    assert steps[0] == 36 * (4 + 3)
    assert steps[2] < steps[1] < steps[0]
    if schedule == "gpipe":
        assert steps == [36 * 4 + 36 * 3 // s for s in (1, 2, 4)]


def test_keys_and_values_of_the_prefix_are_counted():
    table = with_slices(get("gpipe").table(2, 1), 4)
    peaks = [verify(build(table, chain_of_slices(table, activation_bytes=0, kept_bytes=n))).peak_bytes for n in (1, 10)]
    # All keys and values, and what slices 1 to 3 owe, two at a time.
    assert [p[0] for p in peaks] == [5, 50]


@pytest.mark.slow
def test_published_points_of_44b_in_the_simulator():
    """Uniform slices take what was measured, and the cut of the dynamic program is the fastest, as in the paper."""
    stages, seconds = 48, interpolated(GPT_44B, 48)
    lengths = slice_lengths(2048, stages, seconds, unit=64, tolerance_s=1e-4).lengths
    simulated = {}
    for cut in ((2048,), (512,) * 4, (256,) * 8, lengths):
        times = [seconds(n, before) for n, before in zip(cut, accumulate((0, *cut)), strict=False)]
        table = with_slices(get("gpipe").table(stages, 1), len(cut))
        simulated[len(cut) if cut != lengths else "best"] = timed(table, [t / 3 for t in times]).step_time
        assert simulated[len(cut) if cut != lengths else "best"] == pytest.approx(pass_seconds(cut, stages, seconds))
    for count in (1, 4, 8):
        assert simulated[count] == pytest.approx(GPT_44B[count], rel=1e-6)
    assert simulated["best"] == min(simulated.values())
    assert simulated[1] / simulated["best"] == pytest.approx(GPT_44B[1] / BEST_44B, rel=0.2)


def test_equal_stages_knows_slices():
    table = with_slices(get("1f1b").table(2, 2), 2)
    flow = chain_of_slices(table)
    assert run(build(table, flow), equal_stages(table, flow, UNITS)).step_time > 0
