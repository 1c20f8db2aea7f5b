"""Steps of pipelines with what lies on each worker after each instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from autopar.runtime.interpreter import Worker
from autopar.runtime.pipeline import PipelineProgram
from autopar.schedule import Buffer


@dataclass(frozen=True)
class Observed:
    """What lay on workers, by (worker, buffer), when a step began and when it ended."""

    start: Mapping[tuple[int, Buffer], Any]
    end: Mapping[tuple[int, Buffer], Any]


def observed(
    program: PipelineProgram,
    leaves: Sequence[Any],
    observe: Callable[[int, Mapping[int, Mapping[Buffer, Any]]], None] = lambda worker, arrays: None,
) -> Observed:
    """Carries out the lists of a step; gives up no argument.

    Args:
        program: a pipeline of this process.
        leaves: of the call.
        observe: called after each instruction with its worker and what lies on all workers.
    """
    inputs = program.by_name(program.without_aliases([*program.place_all(leaves), *program.constants]))
    batch = program.placed_batch(inputs)
    start = program.start(inputs, batch)
    begun, running = dict(start), {}
    make, do = PipelineProgram.workers, Worker.do

    def workers(*arguments: Any) -> dict[int, Worker]:
        running.update(make(*arguments))
        return running

    def carried_out(self: Worker, instruction: Any) -> Any:
        outputs = do(self, instruction)
        arrays = {n: w.arrays for n, w in running.items()}
        observe(next(n for n, w in running.items() if w is self), arrays)
        return outputs

    with mock.patch.object(PipelineProgram, "workers", workers), mock.patch.object(Worker, "do", carried_out):
        ended = program.carry_out(program.prepare(frozenset(batch)), start)
    return Observed(begun, {(n, b): array for n, w in ended.items() for b, array in w.arrays.items()})
