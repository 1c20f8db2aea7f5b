"""Prices of both ways in which several processes carry a pipeline out, and which of them "auto" takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import autopar
from autopar import Plan
from autopar.api import many_hosts
from autopar.api.many_hosts import takes_one_program
from autopar.api.options import ParallelOptions
from autopar.cost import StartPrices
from autopar.cost.executions import RoundWork, priced, slot_bytes
from autopar.errors import ScheduleError
from autopar.plan.pipeline import ExecutionPrices
from autopar.schedule import Buffer, Recv, Send, build, chain, get
from autopar.schedule.rounds import permutes_of, rounds_of
from autopar.search.planner import execution_prices, round_works
from autopar.simulate import equal_stages
from examples import mlp


def planned(cluster: str, **options: Any) -> Plan:
    """Two stages of four devices each, by hand, on two nodes of four devices."""
    sizes = {"layers": 4, "hidden": 64, "batch": 64, **options.pop("sizes", {})}
    fn, args = mlp.build("tiny", abstract=True, **sizes)
    loaded = autopar.Cluster.load(cluster, nodes=2)
    group = dataclasses.replace(loaded.groups[0], devices_per_node=4)
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", **options}
    search = autopar.search.Manual(dp=4, pp=2)
    on = dataclasses.replace(loaded, groups=(group,))
    return autopar.parallelize(fn, cluster=on, search=search, **options).plan(*args)


def prices_of(plan: Plan) -> ExecutionPrices:
    assert plan.content.pipeline is not None and plan.content.pipeline.executions is not None
    return plan.content.pipeline.executions


def test_the_price_is_the_sum_of_rounds_against_the_step_and_its_starts() -> None:
    rounds = [
        RoundWork((3.0, 0.0), ((0.5,),), ((8, 4), (6,))),
        RoundWork((1.0, 2.0), ((0.25, 0.75), (0.125,)), ((8,), (6, 5, 1))),
    ]
    found = priced(4.0, 100, [5, 7], rounds, StartPrices(start_s=0.01, branch_s=0.001))
    assert found.lists.step_s == pytest.approx(4.0 + 0.07) and found.lists.memory_bytes == 100
    assert found.one_program.step_s == pytest.approx(0.01 + (0.001 + 3 + 0.5) + (0.001 + 2 + 0.75 + 0.125))
    # Slots of 8, 5 and 1; the fullest worker holds 12.
    assert slot_bytes(rounds) == 14 and found.one_program.memory_bytes == 102
    assert (found.rounds, found.permutes) == (2, 3)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_rounds_take_no_less_than_the_slowest_worker_of_each(name: str) -> None:
    schedule = get(name)
    table = schedule.table(4 * schedule.chunks, 8)
    program = build(table, chain(table))
    lists = [w.instructions for w in program.workers]
    durations = equal_stages(table, program.dataflow, {"forward": 1, "backward": 2, "weight": 1}, transfer_s=0.5)
    rounds = rounds_of(lists)
    # Every instruction once, in the order of its list; a value arrives in a later round than it is sent.
    assert [tuple(i for parts in rounds for i in parts[w]) for w in range(4)] == lists
    sent = {i.tag: n for n, parts in enumerate(rounds) for turn in parts for i in turn if isinstance(i, Send)}
    came = {i.tag: n for n, parts in enumerate(rounds) for turn in parts for i in turn if isinstance(i, Recv)}
    assert sent and sent.keys() == came.keys() and all(came[t] > n for t, n in sent.items())
    works = round_works(program, rounds, durations)
    busiest = max(sum(w.busy_s[worker] for w in works) for worker in range(4))
    assert sum(max(w.busy_s) for w in works) >= busiest > 0
    messages = sum(isinstance(i, Send) for line in lists for i in line)
    assert sum(len(p) for w in works for p in w.permutes_s) == messages


def test_lists_that_wait_for_each_other_have_no_rounds() -> None:
    x, y = Buffer("x"), Buffer("y")
    with pytest.raises(ScheduleError, match="wait for each other"):
        rounds_of([(Recv(y, 1, 1), Send(x, 1, 0)), (Recv(x, 0, 0), Send(y, 0, 1))])


def test_a_worker_sends_and_receives_once_in_a_permute() -> None:
    some = [(0, 1, "f32", "a"), (1, 2, "f32", "b"), (0, 2, "f32", "c"), (2, 0, "i32", "d")]
    assert permutes_of(some) == [[(0, 1, "a"), (1, 2, "b")], [(0, 2, "c")], [(2, 0, "d")]]


def test_a_slice_of_tpus_takes_one_program_where_starts_decide() -> None:
    plan = planned("tpu-v5p")
    found = prices_of(plan)
    assert found.taken == "one_program" and found.one_program.step_s < found.lists.step_s
    assert found.rounds > 8 and found.permutes >= 8
    text = plan.explain("pipeline")
    assert "one program of" in text and "lists of each process" in text
    assert " ".join(text.split())[:40] in " ".join(str(plan).split())  # lines keep to the width of the terminal
    assert Plan.from_json(plan.to_json()).content == plan.content


def test_a_slice_of_tpus_takes_lists_where_work_decides() -> None:
    found = prices_of(planned("tpu-v5p", sizes={"hidden": 16384, "batch": 2**16}))
    assert found.taken == "lists" and found.lists.step_s < found.one_program.step_s


@pytest.mark.parametrize("cluster", ["dgx-h100", "local-cpu"])
def test_others_than_a_slice_of_tpus_take_lists(cluster: str) -> None:
    found = prices_of(planned(cluster))
    assert found.taken == "lists" and "one slice" in found.reason and found.one_program.step_s > 0


def test_one_program_has_to_fit_the_memory() -> None:
    least = prices_of(planned("tpu-v5p"))
    assert least.one_program.memory_bytes > least.lists.memory_bytes
    limit = (least.one_program.memory_bytes + least.lists.memory_bytes) // 2
    found = prices_of(planned("tpu-v5p", memory_limit=limit))
    assert found.taken == "lists" and found.reason == "one program exceeds the memory limit"


def test_a_program_of_too_many_branches_is_not_priced() -> None:
    plan = planned("tpu-v5p")
    cluster = autopar.Cluster.load("tpu-v5p", nodes=2)
    assert execution_prices(plan, cluster, StartPrices()) is not None
    assert execution_prices(plan, cluster, StartPrices(most_branches=8)) is None


def test_auto_follows_the_plan_in_several_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("tpu-v5p")
    auto, lists, one = (ParallelOptions(pipeline=p) for p in ("auto", "lists", "one_program"))
    assert [takes_one_program(o, plan) for o in (auto, lists, one)] == [False, False, True]
    monkeypatch.setattr(many_hosts, "many", lambda options: object())
    assert [takes_one_program(o, plan) for o in (auto, lists, one)] == [True, False, True]
    assert not takes_one_program(auto, planned("dgx-h100"))
