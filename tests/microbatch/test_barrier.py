"""Losses that need the whole batch on the stages of a pipeline: all forwards, what meets once, all backwards."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import MicrobatchError, ScheduleError
from autopar.microbatch import analyze_with_barrier
from autopar.schedule import Apply, Dataflow, Run, ValueSpec, Work, WorkerProgram, WorkSpec, build, get, verify
from autopar.simulate import equal_stages, parts_of, run, simulate
from tests.microbatch.running import step_of, traced
from tests.microbatch.test_meetings import (
    balanced,
    batch_norm,
    contrastive,
    decorrelated,
    draw,
    encoded,
    labelled,
    linear_head,
    pairs,
)
from tests.runtime_hosts.test_one_program import both, same
from tests.search.problems import toy


def neighbours(p, x):
    """Each example times the next one, which the gather of a microbatch may find in another microbatch."""
    h = encoded(p, x, 3)
    return jnp.mean((h[(jnp.arange(len(h)) + 1) % len(h)] * h) ** 2)


def squares():
    return {f"w{n}": draw(n, 16, 16) for n in range(3)}, draw(3, 8, 16)


def planned(loss, arguments, stages, count, **options):
    fn = autopar.parallelize(step_of(loss), num_stages=stages, num_microbatches=count, **options)
    return fn, fn.plan(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "arguments", "stages", "count"),
    [
        (contrastive, pairs, 2, 4),
        pytest.param(contrastive, pairs, 4, 3, marks=pytest.mark.slow),
        (linear_head, pairs, 2, 3),
        (decorrelated, pairs, 2, 4),
        (balanced, labelled, 2, 4),
        (neighbours, squares, 3, 2),
        pytest.param(balanced, labelled, 4, 6, marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_the_whole_batch(loss, arguments, stages, count):
    with jax.enable_x64(True):
        args = arguments()
        wanted = jax.jit(step_of(loss))(*args)
        fn, plan = planned(loss, args, stages, count)
        got = fn(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), got, wanted)
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (stages, count, "gpipe")
    assert any(note.startswith("examples meet: all forward passes") for note in plan.notes)


def test_the_simulator_shows_the_barrier_and_memory_is_that_of_gpipe():
    _, plan = planned(decorrelated, pairs(), 2, 4)
    events = simulate(plan).events
    forwards, backwards = ([e for e in events if e.kind == kind] for kind in ("forward", "backward"))
    meetings = [e for e in events if e.kind == "meeting" and e.end_s > e.start_s]
    assert len(forwards) == len(backwards) == 2 * 4 and meetings
    assert max(e.end_s for e in forwards) <= max(e.start_s for e in meetings)
    assert max(e.end_s for e in meetings) <= min(e.start_s for e in backwards)
    assert any(e.kind == "send" and e.name.startswith("met/") for e in events)
    for stage, most in zip(plan.stages, get("gpipe").in_flight(2, 4), strict=True):
        assert stage.memory.in_flight >= (most - 1) * (stage.activation_bytes + stage.received_bytes)
        assert dict(stage.work_times)["meeting"] >= 0


def test_a_backward_pass_that_does_not_wait_is_refused():
    _, plan = planned(contrastive, pairs(), 2, 3, cluster=toy(2))
    table, dataflow, _ = parts_of(plan)
    program = build(table, dataflow)
    assert verify(program).num_transfers
    line = list(program.workers[1].instructions)
    meeting = next(i for i in line if isinstance(i, Apply) and i.work.kind == "meeting")
    forward = [n for n, i in enumerate(line) if isinstance(i, Run) and i.work.kind == "forward"]
    line.remove(meeting)
    line.insert(forward[-1], meeting)
    early = type(program)(table, dataflow, (program.workers[0], WorkerProgram(1, tuple(line))))
    with pytest.raises(ScheduleError, match="lacks the contribution of microbatch 2"):
        verify(early)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_schedules_without_the_barrier_are_refused(schedule):
    stages = 4 if schedule == "interleaved" else 2
    with pytest.raises(ScheduleError, match=r'examples meet(.|\n)*schedule="gpipe"(.|\n)*num_stages=1'):
        planned(contrastive, pairs(), stages, 4, schedule=schedule)


def test_layers_behind_what_meets_are_for_one_stage():
    plain, _ = traced(step_of(batch_norm), labelled())
    with pytest.raises(MicrobatchError, match=r"test_meetings\.py(.|\n)*num_stages=1, which runs 3 loops"):
        analyze_with_barrier(plain.graph, 2)


@pytest.mark.parametrize("loss", [contrastive, linear_head, decorrelated])
def test_no_matrix_of_the_model_meets(loss):
    plain, _ = traced(step_of(loss), pairs())
    microbatching = analyze_with_barrier(plain.graph, 4)
    matrices = {i.name for i in plain.graph.inputs if i.role == "parameter" and i.type.rank > 1}
    assert matrices.isdisjoint(n for id in microbatching.between for n in plain.graph.by_id[id].reads)
    assert {plain.graph.types[n].shape for n in microbatching.met} == {(12, 4)}  # cotangents of what meets


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(3, 9), st.sampled_from([2, 4]))
def test_drawn_sizes(rows, count, width, stages):
    """Any batch, width and number of microbatches and stages."""
    with jax.enable_x64(True):
        tower = {"w0": draw(0, 5, width), "w1": draw(1, width, width)}
        params = {"image": tower, "text": jax.tree.map(lambda w: w - 0.3, tower), "temperature": jnp.asarray(0.1)}
        batch = {"image": draw(2, rows * count, 5), "text": draw(3, rows * count, 5)}
        wanted = jax.jit(step_of(contrastive))(params, batch)
        fn, _ = planned(contrastive, (params, batch), stages, count)
        got = fn(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, wanted)


def meeting_chain(stages: int, owner: int) -> Dataflow:
    """A chain of stages, each of which brings a term to ``owner``, whose result all backward passes read."""
    works, values = [], []
    for s in range(stages):
        ahead = (f"h{s - 1}",) if s else ()
        behind = (f"c{s + 1}",) if s + 1 < stages else ()
        works += [
            WorkSpec(Work("forward", s), ahead, (f"h{s}", f"a{s}"), (f"t{s}",)),
            WorkSpec(Work("meeting", s), (f"t{s}",), (f"m{s}",)),
            WorkSpec(Work("backward", s), (f"a{s}", "met", *behind), (f"c{s}",), (f"g{s}",)),
            WorkSpec(Work("update", s), (f"g{s}",)),
        ]
        values += [ValueSpec(f"{n}{s}", 1, "microbatch") for n in "hac"]
        values += [ValueSpec(f"t{s}", 1, "accumulator", "concatenate"), ValueSpec(f"g{s}", 1, "accumulator", "sum")]
        values.append(ValueSpec(f"m{s}", 1, "step"))
    works.append(WorkSpec(Work("meeting", owner, 1), tuple(f"m{s}" for s in range(stages)), ("met",)))
    return Dataflow(tuple(works), (*values, ValueSpec("met", 1, "step")))


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4))
def test_a_step_takes_both_passes_and_what_meets(stages, count, owner):
    """(m + p - 1) (f + b) of GPipe, section 2.3 there, and the seconds of what meets."""
    table, dataflow = get("gpipe").table(stages, count), meeting_chain(stages, owner % stages)
    program = build(table, dataflow)
    verify(program)
    durations = equal_stages(table, dataflow, {"forward": Fraction(1), "backward": Fraction(2)})
    durations = replace(durations, work_s={**durations.work_s, Work("meeting", owner % stages, 1): Fraction(5)})
    timeline = run(program, durations)
    assert timeline.step_time == (count + stages - 1) * 3 + 5
    with pytest.raises(ScheduleError, match="examples meet"):
        build(get("1f1b").table(stages, max(count, 2)), dataflow)


@pytest.mark.slow
def test_as_one_program_of_many_hosts():
    with jax.enable_x64(True):
        got, want, _ = both(step_of(contrastive), pairs(), num_stages=2, num_microbatches=2)
        same(got, want, 1e-11)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_ray():
    pytest.importorskip("flatbuffers")
    with jax.enable_x64(True), autopar.Cluster.ray(workers=2, devices_per_worker=1) as cluster:
        args = pairs()
        wanted = jax.jit(step_of(contrastive))(*args)
        fn = autopar.parallelize(step_of(contrastive), cluster=cluster, num_microbatches=4, num_stages=2)
        assert fn.plan(*args).schedule == "gpipe"
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-11), fn(*args), wanted)


def test_what_meets_is_as_small_as_it_can_be():
    plain, _ = traced(step_of(balanced), labelled())
    microbatching = analyze_with_barrier(plain.graph, 4)
    assert max(plain.graph.types[n].size for n in microbatching.met) == 4  # an entry an expert, nothing of an example
    assert set(microbatching.between) <= set(microbatching.after)
    assert set(microbatching.met) <= set(microbatching.body_inputs)
    plain, _ = traced(step_of(lambda p, x: ((x["x"] @ p["in"]) ** 2).mean()), labelled())
    assert not analyze_with_barrier(plain.graph, 4).between


def test_free_stages_take_a_plan():
    """A schedule that cannot wait leaves one stage, or one microbatch."""
    args = pairs()
    for schedule in ("auto", "1f1b"):
        options = {"num_microbatches": 4, "schedule": schedule}
        plan = autopar.parallelize(step_of(contrastive), cluster=toy(2), **options).plan(*args)
        assert plan.num_stages == 1 or plan.schedule == "gpipe"
