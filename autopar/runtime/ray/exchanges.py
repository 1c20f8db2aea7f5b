"""Sends between workers of one world: `planned_exchanges` checks and plans them, `exchanges_of` compiles them.

The driver plans from the instruction lists; each worker compiles its part. Moves between steps are not planned here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar._compat.meshes import abstract_mesh, device_mesh
from autopar.lower.pipeline.stage_program import Port
from autopar.runtime.ray.messages import PlannedExchange, PlannedMove
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.step_lists import LaidOut, ListMaker
from autopar.runtime.transport.permutes import ArrayMove, Exchange, MovePrograms
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.runtime.transport.world import axes_of, placed_as
from autopar.schedule import Buffer, Instruction, Recv, Send


def planned_exchanges(source: Pipelined, groups: ProcessGroups) -> tuple[tuple[PlannedExchange, ...], ...]:
    """By worker its exchanges, in the order in which it begins them; processes that follow their lists end.

    Args:
        source: the pipeline.
        groups: the processes of its workers.

    Raises:
        ScheduleError: processes would wait for each other.
    """
    table, workers = source.program.table, range(source.num_workers)
    lists = tuple(w.instructions for w in source.program.workers)
    meshes: dict[tuple[int, int], Any] = {
        (w, s): abstract_mesh(source.axes[s]) for w in workers for s in source.stages(w)
    }
    reads: dict[tuple[int, str], tuple[Port, Any]] = {}
    makes: dict[tuple[int, str], tuple[Port, Any]] = {}
    for program in sorted(source.programs, key=lambda p: p.work):
        for worker in table.workers_of_stage(program.work.stage):
            mesh = meshes[worker, program.work.stage]
            for ports, some in ((reads, program.reads), (makes, program.results)):
                for port in some:
                    ports.setdefault((worker, port.name), (port, mesh))
    processes = tuple(frozenset(groups.members(w)) for w in workers)
    maker = ListMaker(
        source.program.dataflow, table, {p.work: p for p in source.programs}, meshes, reads, processes, -1,
        groups.num_processes, source.batch, MovePrograms(),
    )  # fmt: skip
    start = {
        (worker, p.buffer or Buffer(p.value)): _laid_out(*makes[worker, p.value])
        for worker, places in enumerate(source.places)
        for p in places
        if (worker, p.value) in makes.keys() - reads.keys()
    }
    exchanges = maker.ordered(lists, start, {}).exchanges
    return tuple(_of_worker(w, line, exchanges) for w, line in enumerate(lists))


def _laid_out(port: Port, mesh: Any) -> LaidOut:
    sharding = port.sharding(mesh)
    return LaidOut(port.shape(dict(axes_of(sharding))), port.type.dtype, sharding)


def _of_worker(
    worker: int, instructions: Sequence[Instruction], exchanges: Mapping[int, Exchange]
) -> tuple[PlannedExchange, ...]:
    planned: dict[tuple[int, ...], PlannedExchange] = {}
    for i in instructions:
        if isinstance(i, Send | Recv):
            exchange = exchanges[i.tag]
            assert exchange.program is not None, "workers of different processes send by programs"
            source, target = (worker, i.to) if isinstance(i, Send) else (i.source, worker)
            moves = tuple(map(_planned, exchange.program.moves))
            planned.setdefault(exchange.tags, PlannedExchange(exchange.tags, source, target, moves))
    return tuple(planned.values())


def _planned(move: ArrayMove) -> PlannedMove:
    rank, source, target = len(move.shape), move.source, move.target
    return PlannedMove(
        move.shape, move.dtype, axes_of(source), placed_as(source, rank), axes_of(target), placed_as(target, rank)
    )


def exchanges_of(
    planned: Sequence[PlannedExchange], worker: int, devices: Callable[[int], Sequence[Any]], programs: MovePrograms
) -> dict[int, Exchange]:
    """By tag what a worker sends and receives, with the compiled programs.

    Args:
        planned: its exchanges.
        worker: its number.
        devices: number of a worker -> its devices, in the order of the cluster.
        programs: gets the programs.
    """
    exchanges: dict[int, Exchange] = {}
    for e in planned:
        moves = [
            ArrayMove(
                m.shape,
                m.dtype,
                m.source.sharding(device_mesh(m.axes, devices(e.source))),
                m.target.sharding(device_mesh(m.target_axes, devices(e.target))),
            )
            for m in e.moves
        ]
        exchange = Exchange(e.tags, programs.program(moves), e.source == worker, e.target == worker)
        exchanges.update(dict.fromkeys(e.tags, exchange))
    programs.compile()
    return exchanges
