"""AMPNet: what threads did, replayed, and by an interpreter that knows nothing of stages' programs."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import deque
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import ScheduleError
from autopar.runtime.ampnet import AmpProgram, AmpStage, check_order, choice, load_ampnet, run_stage
from autopar.runtime.transport import WorkerQueues
from autopar.schedule import Run, Table, chain, get, parse_table, to_text
from autopar.schedule.without_flush.ampnet import AmpFlow, AmpNet
from autopar.schedule.without_flush.schedules import check_flush
from benchmarks.stale.tasks import digits
from tests.runtime.stale_models import MODELS, step_of
from tests.runtime.test_stale import SEARCH, slow


def decorated(model, schedule, stages, m):
    params, loss, tx, make = MODELS[model]()
    state = {"params": params, "opt": tx.init(params)}
    options = {"schedule": schedule, "num_stages": stages, "num_microbatches": m, "search": SEARCH}
    step = autopar.parallelize(step_of(loss, tx), cluster=slow(), **options)
    return step, state, [make(jax.random.key(n), 4 * m) for n in range(3)]


def interpreted(params, momentum, batch, order, places, every):
    """Parameters of the perceptron after a call: numpy, each pass with the weights that its stage has then."""
    m, stages = order.num_microbatches, order.num_stages
    (x, y), layers = batch, sorted(params)
    w, v = ({n: np.array(a) for n, a in tree.items()} for tree in (params, momentum))
    held, grads = {}, {n: [] for n in layers}
    rows, done = [deque(row) for row in order.rows], set()
    while any(rows):
        for s, row in enumerate(rows):
            while row:
                kind, k = row[0].kind, row[0].microbatch
                before = ("forward", s - 1, k) if kind == "forward" else ("backward", s + 1, k)
                if before[1] in range(stages) and before not in done:
                    break
                row.popleft()
                done.add((kind, s, k))
                own = [n for n in layers if places[n] == s]
                if kind == "forward":
                    a = held.get(k, {}).get("out", np.array(x[4 * k : 4 * k + 4]))
                    for n in own:
                        held.setdefault(k, {})[n] = a
                        a = np.tanh(a @ w[n])
                        held[k][n, "y"] = a
                    held[k]["out"] = a
                else:
                    g = held[k].get("g")
                    if g is None:
                        g = 2 * (held[k]["out"] - np.array(y[4 * k : 4 * k + 4])) / y.size
                    for n in reversed(own):
                        dz = g * (1 - held[k][n, "y"] ** 2)
                        grads[n].append(held[k][n].T @ dz)
                        g = dz @ w[n].T
                    held[k]["g"] = g
                    for n in own if (k + 1) % every == 0 else ():
                        v[n] = 0.9 * v[n] + sum(grads[n]) * (m // every)
                        w[n] = w[n] - 0.3 * v[n]
                        grads[n] = []
    return w


@pytest.mark.parametrize(("stages", "m", "active", "every"), [(2, 6, 4, 2), (3, 4, None, 1)])
def test_the_order_that_happened_is_replayed_to_the_bit_and_interpreted(x64, stages, m, active, every):
    schedule = AmpNet(max_active_keys=active, min_update_frequency=every)
    step, state, batches = decorated("perceptron", schedule, stages, m)
    for batch in batches:
        new, metrics = step(state, batch)
        order = parse_table(to_text(step.order))
        again, other = step.replay(order, state, batch)
        jax.tree.map(np.testing.assert_array_equal, (new, metrics), (again, other))
        lies = step.compile(state, batch).plan.input_stages
        places = {n: lies[f"state['params']['{n}']"][0] for n in state["params"]}
        want = interpreted(state["params"], state["opt"][0].trace, batch, order, places, every)
        for n, w in want.items():
            np.testing.assert_allclose(new["params"][n], w, rtol=1e-12, atol=1e-12)
        state = new


def test_one_key_at_a_time_and_one_update_is_gradient_accumulation(x64):
    schedule = AmpNet(max_active_keys=1, min_update_frequency=4)
    step, state, batches = decorated("residual", schedule, 2, 4)
    plain, _, _ = decorated("residual", "1f1b", 2, 4)
    other = state
    for batch in batches:
        state, value = step(state, batch)
        other, wanted = plain(other, batch)
        jax.tree.map(np.testing.assert_array_equal, (state, value), (other, wanted))
    assert [str(t) for t in step.order.rows[0][:4]] == ["F0.0", "B0.0", "F0.1", "B0.1"]


class Numbers:
    """A worker that computes nothing."""

    def __init__(self):
        self.arrays, self.placements = {}, {}

    def finish(self):
        pass

    def do(self, instruction):
        for b in instruction.writes if isinstance(instruction, Run) else ():
            self.arrays[b] = 0
        return ()


def flow_of(stages, m, **options):
    table = get("ampnet", **options).table(stages, m)
    dataflow = chain(table)
    own = {n: n for w in dataflow.works if w.work.kind == "update" for n in w.writes}
    return AmpFlow.of(table.name, stages, m, dataflow, own)


def test_no_gradient_is_older_than_the_bound_in_any_order():
    drawn, oldest = random.Random(3), {}
    for case in range(150):
        stages, every, active = drawn.randint(1, 5), drawn.randint(1, 4), drawn.randint(1, 9)
        m = every * drawn.randint(1, 6)
        flow = flow_of(stages, m, max_active_keys=active, min_update_frequency=every)
        assert (flow.most_active, flow.update_every) == (active, every)
        parts = [AmpStage(s, flow, Numbers()) for s in range(stages)]
        weights = [drawn.choice([1, 1, 30]) for _ in parts]
        while any(p.done < m for p in parts):
            able = [p for p in parts if choice(p)]
            assert able, "some stage can always go on"
            (part,) = drawn.choices(able, [weights[p.number] for p in able])
            kind = choice(part)
            for to, buffer, array in part.run(kind):
                parts[to].worker.arrays[buffer] = array
            part.count(kind)
            assert max(p.begun for p in parts) - min(p.done for p in parts) <= active
        for part in parts:
            at, ages, backward = {}, [], 0
            for task in part.passes:
                if task.kind == "forward":
                    at[task.microbatch] = backward // every
                else:
                    ages.append(backward // every - at[task.microbatch])
                    backward += 1
            assert max(ages) <= -(-(active - 1) // every), case
            oldest[active, every] = max(oldest.get((active, every), 0), max(ages))
    assert any(age == -(-(a - 1) // u) > 1 for (a, u), age in oldest.items()), "the bound is reached"


def carried_out(flow, orders=None):
    """The order of each stage in a call of threads that compute nothing."""
    queues, done = WorkerQueues(), {}

    def work(number):
        stage = AmpStage(number, flow, Numbers())
        done[number] = run_stage(stage, queues.link(number), lambda _: None, orders[number] if orders else "")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(flow.stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(done[s] for s in range(flow.stages))


def changed(flow, kind, stage, **fields):
    works = tuple(
        dataclasses.replace(w, **{k: v(w) for k, v in fields.items()})
        if (w.work.kind, w.work.stage) == (kind, stage)
        else w
        for w in flow.dataflow.works
    )
    return dataclasses.replace(flow, dataflow=dataclasses.replace(flow.dataflow, works=works))


def test_a_stage_may_send_in_forward_and_in_backward_passes():
    """Stage 1 sends stage 0 something in its forward pass that the backward pass of stage 0 takes, and a gradient."""
    flow = flow_of(2, 6, max_active_keys=3)
    value = dataclasses.replace(flow.dataflow.by_name[flow.spec("forward", 0).writes[0]], name="late", stages=(1, 0))
    values = dataclasses.replace(flow.dataflow, values=(*flow.dataflow.values, value))
    flow = dataclasses.replace(flow, dataflow=values)
    flow = changed(flow, "forward", 1, writes=lambda w: (*w.writes, "late"))
    flow = changed(flow, "backward", 0, reads=lambda w: (*w.reads, "late"))
    assert AmpStage(0, flow, Numbers()).coming() == {1: 12}
    orders = carried_out(flow)
    assert carried_out(flow, orders) == orders
    assert [sorted(o) for o in orders] == [sorted("FB" * 6)] * 2


def test_an_order_that_cannot_be_is_refused_before_it_runs():
    flow = flow_of(3, 4)
    table = get("ampnet").table(3, 4)
    check_order(flow, table)
    with pytest.raises(ScheduleError, match="have to wait for ever"):
        check_order(flow, Table(table.name, 3, 4, tuple(tuple(reversed(row)) for row in table.rows)))
    with pytest.raises(ScheduleError, match="the step has 3 and 4"):
        check_order(flow, get("ampnet").table(3, 8))
    with pytest.raises(ScheduleError, match="the order has passes"):
        run_stage(AmpStage(0, flow, Numbers()), WorkerQueues().link(0), lambda _: None, "FB")


def test_an_error_in_a_stage_reaches_the_caller(x64, monkeypatch):
    step, state, batches = decorated("perceptron", "ampnet", 2, 2)
    assert isinstance(step.compile(state, batches[0]).local, AmpProgram)
    run = AmpStage.run

    def failing(stage, kind):
        if stage.number == 1 and kind == "backward":
            raise ValueError("lost")
        return run(stage, kind)

    monkeypatch.setattr(AmpStage, "run", failing)
    with pytest.raises(ValueError, match="lost"):
        step(state, batches[0])


def test_what_cannot_be_is_refused(x64):
    with pytest.raises(autopar.ScheduleError, match="min_update_frequency=0"):
        AmpNet(min_update_frequency=0)
    with pytest.raises(autopar.ScheduleError, match="does not divide 4"):
        AmpNet(min_update_frequency=3).table(2, 4)
    with pytest.raises(autopar.ScheduleError, match="on Ray"):
        check_flush("ampnet-k4", "on Ray")
    step, _, _ = decorated("perceptron", "1f1b", 2, 2)
    with pytest.raises(autopar.AutoparError, match="there is no order"):
        _ = step.order


@pytest.mark.slow
def test_digits_are_learned_in_no_more_than_one_and_a_half_times_the_batches():
    task = digits(size=32)
    state = {"params": task.init(jax.random.key(0))}
    state["opt"] = task.optimizer.init(state["params"])
    tx = optax.sgd(0.05 / 4, 0.9)  # an update takes a quarter of the batch
    step = autopar.parallelize(
        step_of(task.loss, tx), schedule="ampnet", num_stages=2, num_microbatches=4, cluster=slow()
    )
    plain = jax.jit(step_of(task.loss, task.optimizer))
    batches = [task.batch(jax.random.key(100 + n)) for n in range(240)]
    other = state
    for batch in batches[:160]:
        other, _ = plain(other, batch)
    for batch in batches:
        state, _ = step(state, batch)
    synchronous, arrived = (float(task.loss(jax.device_get(s["params"]), task.held_out)) for s in (other, state))
    start = float(task.loss(task.init(jax.random.key(0)), task.held_out))
    assert arrived <= synchronous < start / 2


def test_several_processes_are_refused():
    devices = [SimpleNamespace(process_index=n // 2) for n in range(4)]
    with pytest.raises(ScheduleError, match="AMPNet has no order that 2 processes could follow"):
        load_ampnet(None, None, None, None, devices)
