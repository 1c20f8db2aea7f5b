"""Bubbles that were published: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), table 5.

The authors computed them from times of a pass and of a transfer that they measured. The data has both, and the layers
of a stage, which are the chunks of its interleaved schedule.
"""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from autopar.schedule import get
from tests.simulate.helpers import simulated

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "published" / "data"
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
#: Passes of the largest case that is tested always.
LARGE = 8 * 48


def read(name):
    with (DATA / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def cases():
    times = {
        (r["model"], r["microbatches"]): {k: int(v) for k, v in r.items() if k != "model"}
        for r in read("zero_bubble_times.csv")
    }
    for row in read("zero_bubble_table5_bubble_rates.csv"):
        if row["schedule"] in NAMES:
            found = times[row["model"], row["microbatches_m"]]
            name = NAMES[row["schedule"]]
            size = found["stages"] * found["microbatches"]
            marks = [pytest.mark.slow] if size > (LARGE // 2 if name == "interleaved" else LARGE) else []
            label = f"{row['model']}-{found['microbatches']}-{name}"
            yield pytest.param(found, name, float(row["bubble_rate"]), id=label, marks=marks)


CASES = tuple(cases())


def longest_path(table, forward, backward, transfer, waits):
    """Seconds of a step, by arithmetic of its own: every task after its row's last and after all that it needs."""
    ends = {}
    free = [0] * table.num_workers
    rows = [list(reversed(row)) for row in table.rows]
    while any(rows):
        for worker, row in enumerate(rows):
            while row and all(n in ends for n in table.needs(row[-1])):
                task = row.pop()
                start = free[worker]
                for need in table.needs(task):
                    source = table.worker_of(need)
                    if waits(source, worker, task):
                        start = max(start, ends[need] + (transfer if source != worker else 0))
                ends[task] = free[worker] = start + (forward if task.kind == "forward" else backward)
    return max(ends.values())


@pytest.mark.parametrize(("times", "name", "published"), CASES)
def test_bubbles_are_the_published_ones(times, name, published):
    p, m, transfer = times["stages"], times["microbatches"], times["transfer_us"]
    forward, backward, weight = (times[f"{k}_us"] for k in ("forward", "backward", "weight"))
    options = {"chunks": times["layers_a_stage"]} if name == "interleaved" else {}
    chunks = options.get("chunks", 1)
    forward_part = Fraction(forward, chunks)
    backward_part = Fraction(backward if name.startswith("zb") else backward + weight, chunks)
    timeline = simulated(name, p, m, forward_part, backward_part, weight, transfer, **options)
    busy = m * (forward + backward + weight)
    assert {timeline.busy_s(w) for w in range(p)} == {busy}
    # Steps follow each other without a barrier, so the worker that waits longest decides.
    unauthenticated = max(timeline.bubble_s(w) for w in range(p))
    if name == "interleaved":
        table = get(name, **options).table(p * chunks, m)
        assert timeline.step_time == longest_path(table, forward_part, backward_part, transfer, lambda *_: True)
        # What was printed waits for transfers between the last worker and the first only for the first of each p
        # microbatches. All others do wait, so the simulated step is longer.
        unauthenticated = -busy + longest_path(
            table, forward_part, backward_part, transfer, lambda a, b, t: abs(a - b) != p - 1 or t.microbatch % p == 0
        )
    assert float(unauthenticated / (busy + unauthenticated)) == pytest.approx(published, abs=5.1e-5)


def test_all_of_the_table_is_there():
    assert len(CASES) == 48
