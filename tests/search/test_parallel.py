"""A process that plans too: the same answers and errors as here, whatever becomes of it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import autopar
from autopar import InfeasiblePlanError
from autopar.cost import CostModel
from autopar.search import alpa
from autopar.search.cache import Checked
from autopar.search.pipeline.search import may_run_in_worker
from autopar.search.policy import SearchPolicy
from autopar.search.worker_pool import SERIAL, Future, NoAnswerError, Process, WorkerPool, start_worker
from autopar.sharding import register_rule, unregister_rule
from autopar.solver.meter import Meter
from examples import mlp
from tests.search.problems import problem_of, toy, with_policy

pools = sys.modules[start_worker.__module__]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(Process.start())
    assert made.process is not None
    yield made
    made.close()


class Slow:
    """Stands in for a process that answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def call(self, function, args):
        self.calls.append(args)
        self.begun.set()
        self.go.wait(60)
        return ("there", *args), Meter()

    def close(self):
        self.go.set()


def here(x):
    return "here", x


def wait_for(future) -> None:
    assert future.done.wait(60)


def test_answers_and_errors_are_those_of_here(pool: WorkerPool) -> None:
    fn, args = mlp.build(abstract=True)
    problem = problem_of(fn, args, toy(4))
    tight = problem_of(fn, args, toy(4, memory=10))
    plan, none, root = pool.submit(alpa, problem), pool.submit(alpa, tight), pool.submit(math.sqrt, -1.0)
    for future in (plan, none, root):
        wait_for(future)
    assert plan.result() == alpa(problem) and plan.result().to_json() == alpa(problem).to_json()
    with pytest.raises(InfeasiblePlanError) as there:
        none.result()
    with pytest.raises(InfeasiblePlanError) as own:
        alpa(tight)
    assert str(there.value) == str(own.value) and there.value.least_bytes == own.value.least_bytes
    with pytest.raises(ValueError, match="math domain error"):
        root.result()


def test_this_process_begins_with_the_first_and_the_other_with_the_last() -> None:
    slow = Slow()
    made = WorkerPool(slow)
    first = made.submit(here, 0)
    assert slow.begun.wait(60)  # what is submitted is begun at once
    second, third = made.submit(here, 1), made.submit(here, 2)
    assert second.result() == ("here", 1)
    slow.go.set()
    wait_for(third)
    assert first.result() == ("there", 0) and third.result() == ("there", 2)
    assert slow.calls == [(0,), (2,)]
    made.close()


def test_who_waits_for_the_other_process_does_something_else_meanwhile() -> None:
    slow = Slow()
    made = WorkerPool(slow)
    first = made.submit(here, 0)
    assert slow.begun.wait(60)
    second, third = made.submit(here, 1), made.submit(math.sqrt, -1.0)
    threading.Timer(0.2, slow.go.set).start()
    assert first.result() == ("there", 0)
    assert slow.calls == [(0,)]  # the others were made here while it waited
    assert second.outcome == ("here", 1) == second.result()
    with pytest.raises(ValueError, match="math domain error"):
        third.result()
    made.close()


@pytest.mark.slow
def test_the_other_process_goes_on_after_calls_that_were_made_here(pool: WorkerPool) -> None:
    first = pool.submit(time.sleep, 0.2)
    while not first.taken:
        time.sleep(0.001)
    others = [pool.submit(math.sqrt, float(n)) for n in range(3)]
    first.result()  # makes the others meanwhile, of which the pool's thread then sees nothing
    assert all(other.done.is_set() for other in others)
    wait_for(later := pool.submit(math.sqrt, 4.0))
    assert later.outcome == 2.0


def test_without_a_process_all_is_computed_here_when_it_is_wanted() -> None:
    calls: list[int] = []
    future = SERIAL.submit(calls.append, 1)
    assert calls == []
    future.result()
    assert calls == [1] and SERIAL.thread is None


def test_what_was_submitted_is_computed_here_after_the_end(pool: WorkerPool) -> None:
    process = pool.process
    sleeping = pool.submit(time.sleep, 1000)
    while not sleeping.taken:
        time.sleep(0.001)
    left = pool.submit(math.sqrt, 4.0)
    pool.close()
    assert process.child.returncode == -signal.SIGKILL and pool.thread is None
    assert isinstance(sleeping.outcome, NoAnswerError)
    assert left.result() == 2.0
    assert pool.submit(math.sqrt, 9.0).result() == 3.0
    pool.close()


def test_a_process_that_dies_costs_no_answer(pool: WorkerPool) -> None:
    wait_for(pool.submit(math.sqrt, 1.0))
    pool.process.child.kill()
    pool.process.child.wait()
    future = pool.submit(math.sqrt, 4.0)
    wait_for(future)
    assert isinstance(future.outcome, NoAnswerError)
    assert future.result() == 2.0


@pytest.mark.slow
def test_what_cannot_be_sent_is_computed_here(pool: WorkerPool) -> None:
    there = pool.submit(lambda: 5)
    wait_for(there)
    assert isinstance(there.outcome, NoAnswerError) and there.result() == 5
    back = pool.submit(_closure, 5)
    wait_for(back)
    assert isinstance(back.outcome, NoAnswerError) and back.result()() == 5
    wait_for(still := pool.submit(math.sqrt, 4.0))
    assert still.outcome == 2.0


class _Filled(dict):
    """A cache that another thread fills whenever it is pickled."""

    def __reduce__(self):
        raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.slow
def test_what_changes_while_it_is_sent_is_computed_here(pool: WorkerPool) -> None:
    changing = pool.submit(len, _Filled(a=1))
    wait_for(changing)
    assert isinstance(changing.outcome, NoAnswerError) and changing.result() == 1
    wait_for(still := pool.submit(math.sqrt, 4.0))
    assert still.outcome == 2.0


def _closure(value: int):
    return lambda: value


@pytest.mark.slow
def test_what_is_printed_there_is_no_answer(pool: WorkerPool) -> None:
    wait_for(future := pool.submit(print, "a line"))
    assert future.outcome is None
    wait_for(future := pool.submit(math.sqrt, 4.0))
    assert future.outcome == 2.0


def test_it_ends_with_the_process_that_began_it() -> None:
    script = (
        "import math, time\n"
        "from autopar.search.worker_pool import Process\n"
        "p = Process.start()\n"
        "assert p.call(math.sqrt, (4.0,))[0] == 2.0\n"
        "print(p.child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    for _ in range(6000):
        if not _runs(child):
            break
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(found.strip()) and not found.startswith("Z")


@pytest.mark.slow
def test_a_pipeline_is_the_same_with_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.build(abstract=True)
    cluster = toy(4, nodes=2)
    calls: list[object] = []
    call = Process.call
    monkeypatch.setattr(Process, "call", lambda self, f, a: (calls.append(f), call(self, f, a))[1])

    def planned(in_second: bool) -> str:
        parallel = autopar.parallelize(step, cluster=cluster, num_stages=2, num_microbatches=2, search="alpa")
        policy = SearchPolicy(in_second_process=in_second)
        return with_policy(parallel, policy).plan(*args).to_json()

    alone = planned(False)
    assert not calls
    monkeypatch.setattr(pools, "start_worker", Process.start)
    result = Future.result
    monkeypatch.setattr(
        Future, "result", lambda self, meter=None: (self.done.wait(60), result(self, meter))[1]
    )  # the other makes all
    assert planned(True) == alone
    assert Checked(alpa) in calls and len(calls) > 1


def test_who_plans_with_things_of_their_own_plans_here() -> None:
    fn, args = mlp.build(abstract=True)
    problem = problem_of(fn, args, toy(4))
    assert may_run_in_worker(problem, alpa)
    assert not may_run_in_worker(problem, lambda p: alpa(p))
    register_rule("my_kernel", lambda op, types: None)
    try:
        assert not may_run_in_worker(problem, alpa)
    finally:
        unregister_rule("my_kernel")

    class Mine(CostModel):
        pass

    assert not may_run_in_worker(replace(problem, cost_model=Mine(problem.cluster)), alpa)


def test_a_search_has_one_process_for_all_its_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process | None] = []
    monkeypatch.setattr(pools, "start_worker", lambda: (started.append(Process.start()), started[-1])[1])
    fn, args = mlp.build(layers=4, abstract=True)
    parallel = autopar.parallelize(fn, cluster=toy(8, nodes=4), num_microbatches=4, search="alpa")
    policy = SearchPolicy(in_second_process=True)
    plan = with_policy(parallel, policy).plan(*args)
    regions = {row.stages for row in plan.search.trail if row.form == "pipeline" and row.work}
    assert len(regions) > 1, "several numbers of stages are searched"
    assert len(started) == 1
    assert started[0] is not None and started[0].child.poll() is not None, "it ends with the search"


def test_a_pool_starts_nothing_unless_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "start_worker", lambda: pytest.fail("a process was started"))
    pool = WorkerPool()
    pool.begin()
    assert pool.process is None
    future = pool.submit(here, 1)
    pool.forget()
    assert future.result() == ("here", 1)


def test_one_core_begins_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "cores", lambda: 1)
    assert start_worker() is None
