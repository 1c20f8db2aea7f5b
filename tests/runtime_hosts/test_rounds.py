"""One program on all devices as the fourth interpreter of the instruction lists: what is checked and simulated runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import autopar
from autopar import schedule
from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.errors import ScheduleError
from autopar.lower.pipeline.build import LoweredPipeline, lower_pipeline
from autopar.lower.split_layers import SplitStep, split_layers
from autopar.runtime.hosts.one_program import rounds_of
from autopar.schedule import Accumulate, Recv, Run, Send
from autopar.simulate import equal_stages
from autopar.simulate import run as simulated
from tests.runtime_hosts.test_one_program import batch, both, by_hand, state, train

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved", "chimera")
#: Tags of what is no part of the lists: inputs that several workers read, and results that lie elsewhere.
COPIES = 1 << 30


def lowered(schedule: str, stages: int, microbatches: int) -> tuple[LoweredPipeline, SplitStep, autopar.Plan]:
    """A pipeline on the eight devices of this process, of which nothing is compiled."""
    chunks = 2 if schedule == "interleaved" else 1
    options = ParallelOptions(
        search=autopar.search.Manual(dp=8 // stages, pp=stages, chunks=chunks),
        num_microbatches=microbatches,
        schedule=schedule,
        donate_argnums=(0,),
    )
    pure = PureFunction(train, options)
    traced, plan = pure.plan(pure.resolve((state(8), batch(64)), {})[0])
    split_step = split_layers(traced, plan.content.stack_groups)
    return lower_pipeline(split_step.step, plan, platform="cpu"), split_step, plan


@pytest.mark.parametrize("seed", range(8))
def test_rounds_are_the_lists_that_are_checked_and_simulated(x64: None, seed: int) -> None:
    draw = random.Random(seed)
    name = SCHEDULES[seed % len(SCHEDULES)]
    pipeline, split_step, plan = lowered(name, draw.choice([2, 4]), draw.choice([4, 8]))
    program, table = pipeline.instructions, pipeline.table
    schedule.verify(program)
    rounds = rounds_of(pipeline, split_step)[3].rounds
    for worker, own in enumerate(program.workers):
        carried_out = [i for r in rounds for i in r.worker_rounds[worker].instructions if getattr(i, "tag", 0) < COPIES]
        assert carried_out == list(own.instructions)
    # Rounds are steps in time that all take together: no fewer than the simulator has for passes of one second each.
    kinds = {task.kind for row in table.rows for task in row}
    least = simulated(program, equal_stages(table, program.dataflow, dict.fromkeys(kinds, 1))).step_time
    busy = [r for r in rounds if any(isinstance(i, Run) for t in r.worker_rounds for i in t.instructions)]
    assert least <= len(busy)
    assert max(map(len, table.rows)) <= least
    # What is sent in rounds is what the plan says that stages send each other, but for copies.
    sent = sum(isinstance(i, Send) for w in program.workers for i in w.instructions)
    assert sent == sum(isinstance(i, Recv) for w in program.workers for i in w.instructions)
    pairs = [pair for r in rounds for e in r.exchanges for pair in e.pairs]
    copies = sum(
        isinstance(i, Send) and i.tag >= COPIES for r in rounds for t in r.worker_rounds for i in t.instructions
    )
    assert len(pairs) == sent + copies
    assert autopar.simulate(plan).step_time > 0


def without(pipeline: LoweredPipeline, kind: type[Any]) -> LoweredPipeline:
    """The pipeline without the first instruction of a kind that some worker has."""
    program = pipeline.instructions
    worker = next(w for w, own in enumerate(program.workers) if any(isinstance(i, kind) for i in own.instructions))
    own = list(program.workers[worker].instructions)
    own.remove(next(i for i in own if isinstance(i, kind)))
    workers = list(program.workers)
    workers[worker] = structs.replace(workers[worker], instructions=tuple(own))
    return replace(pipeline, instructions=structs.replace(program, workers=tuple(workers)))


@pytest.mark.parametrize("kind", [Send, Recv, Run, Accumulate])
def test_lists_that_the_checker_refuses(x64: None, kind: type[Any]) -> None:
    pipeline, split_step, _ = lowered("1f1b", 2, 4)
    wrong = without(pipeline, kind)
    with pytest.raises(ScheduleError):
        schedule.verify(wrong.instructions)
    if kind is Send:  # who receives waits for ever: that is found before anything is compiled
        with pytest.raises(ScheduleError, match="wait for each other"):
            rounds_of(wrong, split_step)


@pytest.mark.slow
def test_a_device_has_slots_for_what_the_schedule_has_in_flight(x64: None) -> None:
    slots = [len(rounds_of(*lowered(name, 2, 8)[:2])[3].slots) for name in ("1f1b", "gpipe")]
    assert slots[0] < slots[1]


@pytest.mark.slow
def test_the_compiled_program_has_the_permutes_of_its_rounds(x64: None) -> None:
    _, _, one = both(train, (state(), batch()), **by_hand(num_microbatches=4, schedule="1f1b"))
    exchanges = [e for r in one.body.rounds.rounds for e in r.exchanges]
    text = one.executable.as_text()
    shared = len({w for w, _ in one.body.shared})
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == len(exchanges) + shared
    assert np.isfinite(one.executable.memory_analysis().argument_size_in_bytes)
