"""The dataflow of a pipeline from the programs of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from autopar.lower.pipeline.donation import donated as donated_reads
from autopar.lower.pipeline.donation import kind_of
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.plan.pipeline import Lifetime, Reduce
from autopar.schedule import Dataflow, ValueRef, ValueSpec, Work, WorkSpec

_REDUCES: Mapping[str, Reduce] = {
    "sum": "sum", "max": "max", "min": "min", "concatenate": "concatenate", "and": "min", "or": "max",
}  # fmt: skip


def dataflow_of(
    programs: Sequence[StageProgram],
    sizes: Sequence[Mapping[str, int]],
    kinds: Mapping[int, Sequence[str]],
    donated: Set[str] = frozenset(),
    offloaded_stages: Set[int] = frozenset(),
    slices: int = 1,
) -> Dataflow:
    """Reads and writes of the programs of all stages.

    Args:
        programs: of all stages.
        sizes: by stage the sizes of its mesh axes.
        kinds: by stage the kinds of work that its tasks run; programs that are not there are empty.
        donated: names of the step's inputs that the caller gives up.
        offloaded_stages: stages whose microbatches wait for their backward pass in host memory.
        slices: slices of tokens of each microbatch.
    """
    values: dict[str, ValueSpec] = {}
    works = _empty_works(kinds, slices)
    read: set[str] = set()
    for program in programs:
        read.update(p.name for p in program.reads)
    for program in programs:
        stage = program.work.stage
        for port in program.writes:
            host = stage in offloaded_stages and port.ref.kind == "activation"
            values[port.name] = ValueSpec(
                port.name,
                port.local_bytes(sizes[stage]),
                _lifetime(port.ref),
                result=port.ref.kind == "out",
                host=host,
                ref=port.ref,
            )
        for port, reduce in program.accumulates:
            values[port.name] = ValueSpec(
                port.name, port.local_bytes(sizes[stage]), "accumulator", reduce=_REDUCES[reduce], ref=port.ref
            )
        works[program.work] = WorkSpec(
            program.work,
            tuple(dict.fromkeys(p.name for p in program.reads)),
            tuple(p.name for p in program.writes),
            tuple(p.name for p, _ in program.accumulates),
            aliases=_aliases(program, sizes[stage]),
        )
    for program in programs:
        stage = program.work.stage
        for port in program.reads:
            if port.name not in values:
                values[port.name] = ValueSpec(
                    port.name,
                    port.local_bytes(sizes[stage]),
                    _lifetime(port.ref),
                    stages=(stage,),
                    donated=port.ref.kind == "in" and port.ref.name in donated,
                    ref=port.ref,
                )
    return Dataflow(tuple(works[w] for w in sorted(works)), tuple(values.values()))


def _aliases(program: StageProgram, sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Arguments and results that share a buffer where the argument is given up; see `donation.donated`."""
    at = donated_reads(program, {p.name for p in program.reads}, sizes)
    free, pairs = list(program.results), []
    for n in at:
        port = program.reads[n]
        result = next(p for p in free if kind_of(p, sizes) == kind_of(port, sizes))
        free.remove(result)
        pairs.append((port.name, result.name))
    return tuple(pairs)


def _empty_works(kinds: Mapping[int, Sequence[str]], slices: int) -> dict[Work, WorkSpec]:
    """All works that tasks run, as if none had a program."""
    numbers = range(slices)
    works = [Work(kind, s, k) for s, some in kinds.items() for kind in some for k in numbers]  # type: ignore[arg-type]
    return {work: WorkSpec(work) for work in works}


def _lifetime(ref: ValueRef) -> Lifetime:
    return "microbatch" if ref.kind in ("from", "batch", "activation") else "step"
