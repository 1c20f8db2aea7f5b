"""One order of all instructions: every process comes to its end in it, and the checker refuses others."""

from __future__ import annotations

import graphlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.schedule import Buffer, Free, Instruction, Recv, Run, Send, build, chain, get, made_by, schedules, used_by
from autopar.schedule.memory import starting_buffers
from autopar.schedule.order import Launch, Order, check_starts, order_of, starts_of
from tests.schedule.flows import rich

CASES = 200
NAMES = [name for name in schedules() if name not in ("table", "ampnet", "2bw", "pipedream", "pipedream-vertical")]


def drawn(
    seed: int, count: int | None = None
) -> tuple[str, list[tuple[Instruction, ...]], list[set[Buffer]], list[frozenset[int]], int] | None:
    """Lists of a schedule by chance, what lies where when they begin, and workers dealt to processes; None: no such.

    ``count`` is the number of processes; else it is drawn too.
    """
    draw = random.Random(seed)
    name, workers, microbatches = draw.choice(NAMES), draw.choice([2, 3, 4, 6, 8]), draw.choice([2, 4, 6, 8, 12])
    schedule = get(name)
    try:
        table = schedule.table(workers * schedule.chunks, microbatches)
    except ScheduleError:
        return None
    flow = rich(table) if draw.random() < 0.5 and not table.after else chain(table, global_norm=draw.random() < 0.5)
    program = build(table, flow)
    lists = [w.instructions for w in program.workers]
    # A process has several workers, or a worker several processes; the order of devices may be any.
    count = count or draw.choice([2, 3, 4])
    processes = [frozenset(draw.sample(range(count), draw.choice([1, 1, 1, 2]))) for _ in lists]
    return name, lists, [set(b) for b in starting_buffers(program)], processes, count


def agrees(order: Order) -> bool:
    """Whether there is one order that agrees with that of every process."""
    before: dict[int, set[int]] = {n: set() for n in range(len(order.launches))}
    for numbers in order.starts:
        for a, b in itertools.pairwise(numbers):
            before[b].add(a)
    try:
        return bool(list(graphlib.TopologicalSorter(before).static_order()))
    except graphlib.CycleError:
        return False


def carried_out(lists: Sequence[Sequence[Instruction]], there: list[set[Buffer]], launches: Sequence[Launch]) -> None:
    """Follows launches: what an instruction uses is there."""
    for launch in launches:
        for worker, numbers in ((launch.worker, launch.at), (launch.target, launch.target_at)):
            for n in numbers:
                i = lists[worker][n]
                assert set(used_by(i)) <= there[worker], (worker, i)
                there[worker] |= set(made_by(i))
                if isinstance(i, Free):
                    there[worker] -= set(i.values)


@pytest.mark.slow
def test_every_process_comes_to_its_end_in_drawn_schedules() -> None:
    names, seed = [], 0
    while len(names) < CASES:
        case = drawn(seed)
        seed += 1
        if case is None:
            continue
        name, lists, there, processes, count = case
        order = starts_of(order_of(lists), processes, count)
        check_starts(lists, processes, order)
        assert agrees(order), seed
        carried_out(lists, there, order.launches)
        assert order == starts_of(order_of(lists), processes, count)
        names.append(name)
    assert set(names) == set(NAMES)


def swapped(order: Order, process: int, first: int, second: int) -> Order:
    """The order in which a process starts two of its launches the other way round."""
    numbers = list(order.starts[process])
    a, b = numbers.index(first), numbers.index(second)
    numbers[a], numbers[b] = second, first
    starts = tuple(tuple(numbers) if p == process else s for p, s in enumerate(order.starts))
    return replace(order, starts=starts)


def pipeline(name: str = "1f1b", stages: int = 4) -> tuple[list[tuple[Instruction, ...]], Order, list[frozenset[int]]]:
    """Four workers, of which the first and the third are one process and the others another."""
    table = get(name).table(stages, 4)
    lists = [w.instructions for w in build(table, chain(table)).workers]
    processes = [frozenset({w % 2}) for w in range(len(lists))]
    return lists, starts_of(order_of(lists), processes, 2), processes


def test_two_sends_in_different_orders_on_two_processes_are_refused() -> None:
    x, y = Buffer("x"), Buffer("y")
    lists = [(Send(x, 1, 0),), (Recv(x, 0, 0),), (Send(y, 3, 1),), (Recv(y, 2, 1),)]
    processes = [frozenset({w % 2}) for w in range(4)]
    order = starts_of(order_of(lists), processes, 2)
    check_starts(lists, processes, order)
    wrong = swapped(order, 0, 0, 1)
    assert not agrees(wrong)
    said = r"processes wait for each other: process \d waits at SEND [xy] to worker .; process \d waits at SEND"
    with pytest.raises(ScheduleError, match=said.replace("worker .;", "worker ., tag . of worker .;")):
        check_starts(lists, processes, wrong)


def test_a_send_that_one_process_starts_before_its_turn_is_refused() -> None:
    lists, order, processes = pipeline()
    mine = order.starts[0]
    refused = 0
    for a, b in itertools.combinations([n for n in mine if order.launches[n].target is not None], 2):
        between = mine[mine.index(a) : mine.index(b)]
        if {w for n in between for w in order.launches[n].workers} & {*order.launches[b].workers}:
            continue  # its worker is not there yet
        early = [n for n in mine if n != b]
        early.insert(early.index(a), b)
        wrong = replace(order, starts=(tuple(early), order.starts[1]))
        if agrees(wrong):
            check_starts(lists, processes, wrong)
            continue
        with pytest.raises(ScheduleError, match="processes wait for each other"):
            check_starts(lists, processes, wrong)
        refused += 1
    assert refused


def test_an_order_that_no_list_has_is_refused() -> None:
    lists, order, processes = pipeline()
    own = [n for n in order.starts[0] if order.launches[n].worker == 0 and order.launches[n].target is None]
    runs = [n for n in own if isinstance(lists[0][order.launches[n].at[0]], Run)]
    with pytest.raises(ScheduleError, match="out of turn"):
        check_starts(lists, processes, swapped(order, 0, runs[0], runs[1]))
    frees = [n for n in own if isinstance(lists[0][order.launches[n].at[0]], Free)]
    before = next(n for n in reversed(own) if n < frees[0])
    with pytest.raises(ScheduleError, match="out of turn"):
        check_starts(lists, processes, swapped(order, 0, before, frees[0]))


def test_a_launch_that_a_process_leaves_out_is_refused() -> None:
    lists, order, processes = pipeline()
    send = next(n for n, launch in enumerate(order.launches) if launch.target is not None)
    fewer = replace(order, starts=(tuple(n for n in order.starts[0] if n != send), *order.starts[1:]))
    with pytest.raises(ScheduleError, match=r"is started by processes \[1\], and processes \[0, 1\] have devices"):
        check_starts(lists, processes, fewer)
    own = next(n for n in order.starts[0] if order.launches[n].target is None)
    twice = replace(order, starts=((own, *order.starts[0]), *order.starts[1:]))
    with pytest.raises(ScheduleError, match="is started by processes"):
        check_starts(lists, processes, twice)


def test_what_is_sent_has_to_be_what_is_received() -> None:
    lists, order, processes = pipeline()
    sends = [n for n, x in enumerate(order.launches) if (x.worker, x.target) == (0, 1)]
    one, two = (order.launches[n] for n in sends[:2])
    launches = list(order.launches)
    launches[sends[0]] = replace(one, target_at=two.target_at)
    with pytest.raises(ScheduleError, match="what is sent is not what is received"):
        check_starts(lists, processes, replace(order, launches=tuple(launches)))


def test_workers_that_wait_for_each_other_have_no_order() -> None:
    x, y = Buffer("x"), Buffer("y")
    # With a queue between them both would send first and receive then; where they meet neither can.
    lists = [(Send(x, 1, 0), Recv(y, 1, 1)), (Send(y, 0, 1), Recv(x, 0, 0))]
    with pytest.raises(ScheduleError, match="workers wait for each other: worker 0 waits at SEND x to worker 1"):
        order_of(lists)


def test_values_that_follow_each_other_are_sent_together() -> None:
    x, y, z = Buffer("x"), Buffer("y"), Buffer("z")
    lists = [
        (Send(x, 1, 0), Free((x,)), Send(y, 1, 1), Free((y,)), Send(z, 1, 2)),
        (Recv(x, 0, 0), Recv(y, 0, 1), Free((x,)), Recv(z, 0, 2)),
    ]
    sent = [launch for launch in order_of(lists) if launch.target is not None]
    assert sent == [Launch(0, (0, 2), 1, (0, 1)), Launch(0, (4,), 1, (3,))]
    processes = [frozenset({0}), frozenset({1})]
    check_starts(lists, processes, starts_of(order_of(lists), processes, 2))
