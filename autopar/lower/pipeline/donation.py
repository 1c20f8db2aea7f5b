"""Arguments of stage programs that give their buffers to results: instruction lists never use them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from autopar.lower.pipeline.ports import Port
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.schedule import Apply, Program, Run, Send, Work


def given_up(program: Program, worker: int) -> Mapping[Work, frozenset[str]]:
    """Values that a worker never uses again after a work, by work.

    What it sends stays out: the value may still be on its way when the work runs.

    Args:
        program: instruction lists that `autopar.schedule.verify` accepts.
        worker: its number.
    """
    lines = program.workers[worker].instructions
    sent = {i.value.value for i in lines if isinstance(i, Send)}
    donated: dict[Work, frozenset[str]] = {}
    for i in lines:
        if isinstance(i, Run | Apply):
            names = frozenset(b.value for b in i.donate) - sent
            donated[i.work] = donated.get(i.work, names) & names
    return donated


def given_up_by_all(program: Program, stages: Sequence[Sequence[int]], work: Work) -> frozenset[str]:
    """Values that no worker which runs a work uses again when it has run it.

    Args:
        program: see `given_up`.
        stages: by worker the stages that it holds.
        work: of one of them.
    """
    holders = [w for w, held_stages in enumerate(stages) if work.stage in held_stages]
    return frozenset.intersection(*(given_up(program, w).get(work, frozenset()) for w in holders))


def donated(program: StageProgram, names: Set[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of the arguments whose buffers become results: given up, and each with a result just like it.

    Args:
        program: of a stage.
        names: values that are given up.
        sizes: sizes of the mesh axes.
    """
    free = [kind_of(p, sizes) for p in program.results]
    positions = []
    for n, port in enumerate(program.reads):
        kind = kind_of(port, sizes)
        alone = sum(p.name == port.name for p in program.reads) == 1
        if port.name in names and alone and kind in free:
            free.remove(kind)
            positions.append(n)
    return tuple(positions)


def kind_of(port: Port, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], str, Sequence[object], bool]:
    """Shape, dtype and partition of the array of a port, and whether it is in host memory."""
    spec = tuple(port.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return port.shape(sizes), port.type.dtype, spec, port.host
