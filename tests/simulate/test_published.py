"""Bubbles that were published: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), table 5.

The authors computed them from times of a pass and of a transfer that they measured. The data has both, and the layers
of a stage, which are the chunks of its interleaved schedule.
"""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("times", "name", "published"), CASES)
def test_bubbles_are_the_published_ones(times, name, published):
    p, m = times["stages"], times["microbatches"]
    forward, backward, weight = (times[f"{k}_us"] for k in ("forward", "backward", "weight"))
    options = {"chunks": times["layers_a_stage"]} if name == "interleaved" else {}
    chunks = options.get("chunks", 1)
    whole = backward if name.startswith("zb") else backward + weight
    timeline = simulated(
        name, p, m, Fraction(forward, chunks), Fraction(whole, chunks), weight, times["transfer_us"], **options
    )
    busy = m * (forward + backward + weight)
    assert {timeline.busy_s(w) for w in range(p)} == {busy}
    # Steps follow each other without a barrier, so the worker that waits longest decides.
    waiting = max(timeline.waiting_s(w) for w in range(p))
    # Four digits were printed. Of the interleaved ones it is not said how transfers between chunks were counted.
    close = 0.004 if name == "interleaved" else 5.1e-5
    assert float(waiting / (busy + waiting)) == pytest.approx(published, abs=close)


def test_all_of_the_table_is_there():
    assert len(CASES) == 48
