"""Rows of the file of published runs: what is read, what is left out, that nothing is both fitted and held out."""

import csv

import pytest

from autopar.cluster import Cluster
from autopar.cost.constants import load_constants
from benchmarks.published import dataset
from benchmarks.published.dataset import BY_GROUP, HELD_OUT, POINTS, load, read
from benchmarks.published.score import rank_correlation, score


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


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("changes", "stack", "cluster"),
    [
        ({"hardware": "H200 SXM 141GB"}, "megatron-core", "h200"),
        ({"hardware": "TPU v5p"}, "xla", "tpu-v5p"),
        ({"fsdp_or_zero": "FSDP full shard"}, "fsdp", "dgx-a100"),
        ({"dataset": "vTrain multi-node"}, "megatron-deepspeed", "dgx-a100"),
        ({"heads": "", "kv_heads": "", "micro_batch": "", "devices_per_node": ""}, "megatron", "dgx-a100"),
    ],
)
def test_other_rows_are_read(tmp_path, changes, stack, cluster):
    (run,) = load(written(tmp_path, changes))
    assert (run.stack, run.cluster.name) == (stack, cluster)
    (scored,) = score([run], load_constants())
    assert scored.prediction.step_s > 0


def test_what_does_not_say_whether_it_recomputes_does_where_it_must(tmp_path):
    unsaid = {"recompute": "not published"}
    (run,) = load(written(tmp_path, unsaid | {"micro_batch": "1"}))
    assert run.plans[0].recompute == "none"
    (run,) = load(written(tmp_path, unsaid | {"micro_batch": "16"}))
    assert run.plans[0].recompute == "full"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "abacus"}, "no cluster file for the hardware"),
        ({"layers": "many"}, "layers is no number"),
        ({"vpp_chunks": "several"}, "vpp_chunks is no number"),
        ({"fsdp_or_zero": "sharded somehow"}, "unknown partition of the state: sharded somehow"),
        ({"recompute": "some"}, "unknown recomputation: some"),
    ],
)
def test_unknown_words_skip_the_row_and_are_counted(tmp_path, changes, reason):
    points = read(written(tmp_path, changes))
    assert (points.runs, dict(points.skipped)) == ((), {reason: 1})


@pytest.mark.parametrize(
    ("text", "zero"),
    [("ZeRO-2 style", 2), ("FSDP ZeRO-2 style", 2), ("FSDP", 3), ("distributed optimizer (assumed)", 1), ("none", 0)],
)
def test_partitions_of_the_state_are_read(tmp_path, text, zero):
    (run,) = load(written(tmp_path, {"fsdp_or_zero": text}))
    assert {p.zero for p in run.plans} == {zero}


@pytest.mark.parametrize(("schedule", "meaning"), [("ZB-1p", "zb-h1"), ("ZB-2p", "zb-h2"), ("ZB-V", "zb-v")])
def test_zero_bubble_schedules_are_read(tmp_path, schedule, meaning):
    (run,) = load(written(tmp_path, {"schedule": schedule, "vocab": ""}))
    assert ({p.schedule for p in run.plans}, run.spec.vocab) == ({meaning}, 51200)


def test_a_sweep_is_read_in_one_way(tmp_path):
    """Of two runs of one model the larger microbatch fits only if layers are recomputed: so are both."""
    row = {**rows()[0], "recompute": "full (per simulation config)", "dataset": "vTrain single-node"}
    path = tmp_path / "points.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([{**row, "point_id": "1", "micro_batch": "1"}, {**row, "point_id": "2", "micro_batch": "16"}])
    assert [r.plans[0].recompute for r in load(path)] == ["full", "full"]
    assert [r.plans[0].recompute for r in load(written(tmp_path, {**row, "micro_batch": "1"}))] == ["none"]


def test_a_cluster_file_is_read_once_for_all_rows(monkeypatch):
    read_files = []
    loaded = Cluster.load
    dataset._listed.cache_clear()
    monkeypatch.setattr(Cluster, "load", lambda name: read_files.append(name) or loaded(name))
    assert len(load()) == len(rows())
    assert len(read_files) == len(set(read_files)) > 1


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([1, 2, 3, 4], [10, 20, 40, 30], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 2, 3], [9, 5, 1], -1.0),
        ([1, 1, 2], [1, 2, 3], 0.75**0.5),  # the two have the rank 1.5
        ([2, 2, 2], [1, 2, 3], 0.0),
    ],
)
def test_correlation_of_ranks(a, b, wanted):
    assert rank_correlation(a, b) == pytest.approx(wanted)
