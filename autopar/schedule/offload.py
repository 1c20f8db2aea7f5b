"""OFFLOAD and FETCH: what a microbatch waits with leaves the device until shortly before it is used again."""

from __future__ import annotations

from itertools import pairwise

from autopar.schedule.dataflow import Dataflow
from autopar.schedule.instructions import (
    Buffer,
    Fetch,
    Instruction,
    Offload,
    Run,
    WorkerProgram,
    made_by,
    used_by,
)

#: Microbatches next to the one that runs whose activations are on the device although they are kept in host memory: the
#: one that leaves or comes.
IN_TRANSFER = 1


def offload_activations(dataflow: Dataflow, workers: tuple[WorkerProgram, ...]) -> tuple[WorkerProgram, ...]:
    """The lists with every buffer of a value with ``host`` moved to the host while others run.

    It leaves right after the instruction that makes or uses it, and comes back before the last program before its next
    use, next to which it can be moved. Where no more than one program lies between, it stays.

    Args:
        dataflow: says which values.
        workers: what `autopar.schedule.free_early` made.
    """
    names = {v.name for v in dataflow.values if v.host}
    return tuple(WorkerProgram(w.worker, _moved(w.instructions, names)) for w in workers) if names else workers


def _moved(lines: tuple[Instruction, ...], names: set[str]) -> tuple[Instruction, ...]:
    touched: dict[Buffer, list[int]] = {}
    for number, i in enumerate(lines):
        for buffer in dict.fromkeys((*made_by(i), *used_by(i))):
            if buffer.value in names:
                touched.setdefault(buffer, []).append(number)
    runs = [number for number, i in enumerate(lines) if isinstance(i, Run)]
    following: dict[int, list[Instruction]] = {}
    ahead: dict[int, list[Instruction]] = {}
    for buffer, at in sorted(touched.items()):
        for before, after in pairwise(at):
            between = [r for r in runs if before < r < after]
            if len(between) > 1:
                following.setdefault(before, []).append(Offload(buffer))
                ahead.setdefault(between[-1], []).append(Fetch(buffer))
    return tuple(
        i for number, line in enumerate(lines) for i in (*ahead.get(number, ()), line, *following.get(number, ()))
    )
