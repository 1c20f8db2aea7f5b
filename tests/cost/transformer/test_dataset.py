"""Rows of the file of published runs: what is read, what is left out, that nothing is both fitted and held out."""

import csv

import pytest

from benchmarks.published.dataset import BY_GROUP, HELD_OUT, POINTS, load


def rows():
    with POINTS.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def written(tmp_path, changes):
    """The first row with ``changes``, as a file."""
    row = {**rows()[0], **changes}
    path = tmp_path / "points.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


def test_every_row_is_a_run():
    runs = load()
    assert [r.point for r in runs] == [int(r["point_id"]) for r in rows()]
    assert all(p.devices == d for r, d in zip(runs, (int(x["devices"]) for x in rows()), strict=True) for p in r.plans)
    assert sum(r.out_of_memory for r in runs) == 2
    assert all((r.measured_s is None) == r.out_of_memory for r in runs)


def test_parts_do_not_meet():
    runs = load()
    assert not any(r.fitted for r in runs if r.dataset in HELD_OUT)
    of_groups = {r.group: r.fitted for r in runs}
    assert all(of_groups[r.group] == r.fitted for r in runs if r.dataset in BY_GROUP)
    assert 0.3 < sum(r.fitted for r in runs) / len(runs) < 0.7


@pytest.mark.parametrize(
    "changes", [{"hardware": "abacus"}, {"tp": "5"}, {"micro_batch": "7"}], ids=["hardware", "heads", "microbatch"]
)
def test_rows_that_cannot_be_are_left_out(tmp_path, changes):
    assert load(written(tmp_path, changes)) == ()


@pytest.mark.parametrize(
    ("changes", "stack", "cluster"),
    [
        ({"hardware": "H200 SXM 141GB"}, "megatron-core", "h200"),
        ({"hardware": "TPU v5p"}, "megatron-core", "tpu-v5p"),
        ({"dataset": "vTrain multi-node"}, "megatron-deepspeed", "dgx-a100"),
        ({"heads": "", "kv_heads": "", "micro_batch": "", "devices_per_node": ""}, "megatron", "dgx-a100"),
    ],
)
def test_other_rows_are_read(tmp_path, changes, stack, cluster):
    (run,) = load(written(tmp_path, changes))
    assert (run.stack, run.cluster.name) == (stack, cluster)


def test_what_does_not_say_whether_it_recomputes_does_where_it_must(tmp_path):
    unsaid = {"recompute": "not published"}
    (run,) = load(written(tmp_path, unsaid | {"micro_batch": "1"}))
    assert run.plans[0].recompute == "none"
    (run,) = load(written(tmp_path, unsaid | {"micro_batch": "16"}))
    assert run.plans[0].recompute == "full"
