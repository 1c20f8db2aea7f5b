"""Compiles a pipeline whose lists the processes of a world carry out: see `load_lists`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.world import World, world
from autopar.frontend import Traced
from autopar.ir.analysis import unread_inputs
from autopar.lower.hosted import check_host_memory, hosted_of, sharding_of
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stage_program import Port
from autopar.lower.program import stage_devices
from autopar.lower.split_layers import SplitStep
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.hosts.announced import Announced, Announcement
from autopar.runtime.hosts.arrays import copied, put
from autopar.runtime.hosts.step_lists import ArrayPlace, ListMaker, StepLists
from autopar.runtime.hosts.world_lists import WorldLists
from autopar.runtime.loaded import StepShardings, described_inputs
from autopar.runtime.local_pipeline import (
    compiled_stages,
    input_place,
    stage_mesh,
    worker_meshes,
)
from autopar.runtime.pipeline import Loaded
from autopar.runtime.stacked import StackedLeaf
from autopar.runtime.transport.permutes import MovePrograms
from autopar.schedule import Work
from autopar.schedule.memory import WorkerMemory, worker_memory

#: Bytes of a result that is no state up to which every process gets it.
SMALL_BYTES = 1 << 16


def load_lists(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    devices: Sequence[Any],
    donated: Sequence[int] = (),
    *,
    spared: Set[str] = frozenset(),
    by_hand: bool = True,
    flushes: bool = True,
) -> WorldLists:
    """Compiles a pipeline for the devices of all processes: each process the programs of its own workers.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        lowered: its pipeline.
        devices: jax devices of all processes, in the order of the cluster.
        donated: indices of the inputs that the caller gives up.
        spared: values into whose buffers no program may write.
        by_hand: whether values inside one process change hands; else they are moved by programs too.
        flushes: whether the lists are those of a step; else somebody else makes those of calls.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
        PlanMismatchError: the plan keeps something in host memory that the devices have no access to.
        ProcessMismatchError: a process has other lists.
    """
    check_host_memory(lowered.plan.content, [d for d in devices if d.process_index == jax.process_index()])
    meshes = worker_meshes(lowered, devices)
    loaded = compiled_stages(lowered, meshes, spared)
    maker = _maker(lowered, meshes, by_hand)
    shardings, origins, ends, leaves, results = _places(lowered, split_step, maker.ports, devices)
    shared = [] if by_hand and jax.process_count() == 1 else _announced(traced, split_step, ends)
    announcement = Announcement(shared, devices)
    by_name = {i.name: origin for i, origin in zip(split_step.step.graph.inputs, origins, strict=True)}
    lists = tuple(w.instructions for w in lowered.instructions.workers)

    @cache
    def prepare(placed_batch: frozenset[str]) -> StepLists:
        step = maker.make(lists, by_name, [e for e in ends if e.makers], placed_batch)
        maker.programs.compile()
        return step

    first = prepare(frozenset()) if flushes else None
    announcement.compile()
    outputs = tuple(
        announcement.sharding if at[0] in announcement.numbers else sharding
        for at, sharding in zip(split_step.outputs, shardings.output_shardings, strict=True)
    )
    count = len(traced.signature.traced)
    constants = zip(traced.closed_over, shardings.input_shardings[count:], strict=True)
    processes = world()
    return WorldLists(
        *described_inputs(traced, donated),
        tuple(put(copied(c), s) for c, s in constants),
        lowered,
        StepShardings(shardings.input_shardings, outputs),
        split_step,
        leaves,
        results,
        unread_inputs(traced.graph) - set(donated),
        loaded,
        maker.ports,
        origins,
        ends,
        prepare,
        maker,
        announcement,
        jax.process_index(),
        () if first is None else _memory(processes, traced.graph.name, lowered, loaded, first),
    )


def _maker(lowered: LoweredPipeline, meshes: Mapping[tuple[int, int], Mesh], by_hand: bool) -> ListMaker:
    table, ports = lowered.table, dict[tuple[int, str], tuple[Port, Mesh]]()
    for program in sorted(lowered.programs, key=lambda p: p.work):
        for worker in table.workers_of_stage(program.work.stage):
            for port in program.reads:
                ports.setdefault((worker, port.name), (port, meshes[worker, program.work.stage]))
    processes = tuple(
        frozenset(d.process_index for (w, _), mesh in meshes.items() if w == worker for d in mesh.devices.flat)
        for worker in range(table.num_workers)
    )
    return ListMaker(
        lowered.instructions.dataflow,
        table,
        {p.work: p for p in lowered.programs},
        meshes,
        ports,
        processes,
        jax.process_index(),
        jax.process_count(),
        lowered.map.microbatching.batch,
        MovePrograms(),
        by_hand,
    )


def _places(
    lowered: LoweredPipeline,
    split_step: SplitStep,
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]],
    devices: Sequence[Any],
) -> tuple[
    StepShardings,
    tuple[ArrayPlace, ...],
    tuple[ArrayPlace, ...],
    dict[int, StackedLeaf],
    dict[int, StackedLeaf],
]:
    """Places of inputs and outputs of the step, whole and in pieces."""
    content, graph = lowered.plan.content, split_step.step.graph
    meshes = [stage_devices(lowered.plan, s, devices) for s in range(lowered.plan.num_stages)]
    hosted = hosted_of(content)
    origins: dict[int, ArrayPlace] = {}
    leaves: dict[int, StackedLeaf] = {}
    inputs: list[NamedSharding] = []
    for n, (at, record) in enumerate(zip(split_step.inputs, content.inputs, strict=True)):
        if len(at) == 1:
            sharding = sharding_of(record, meshes[record.stage], host=n in hosted.inputs)
            places = [(lowered.worker_of_stage(record.stage), sharding)]
        else:
            places = [input_place(lowered, graph.inputs[i].name, ports, meshes) for i in at]
        places, leaf = _together(places)
        inputs.append(leaf.sharding)
        if len(at) > 1:
            leaves[n] = leaf
        for i, (worker, sharding) in zip(at, places, strict=True):
            x = graph.inputs[i]
            piece = _microbatch_place(lowered, x.name, x.type.shape, sharding)
            origins[i] = ArrayPlace(worker, sharding, x.type.shape, x.type.dtype, microbatch=piece)
    names = {x.name: i for i, x in enumerate(graph.inputs)}
    makers_of = made_outputs(lowered)
    ends: dict[int, ArrayPlace] = {}
    results: dict[int, StackedLeaf] = {}
    outputs: list[NamedSharding] = []
    for n, (at, wanted) in enumerate(zip(split_step.outputs, content.outputs, strict=True)):
        updated = [graph.outputs[i].updates for i in at]
        if all(u in names for u in updated):
            places = [(origins[names[str(u)]].worker, origins[names[str(u)]].sharding) for u in updated]
        elif len(at) == 1:
            sharding = sharding_of(wanted, meshes[wanted.stage], host=n in hosted.outputs)
            _, makers, _, _ = makers_of[at[0]]
            worker = lowered.worker_of_stage(wanted.stage)
            places = [(worker if worker in makers else min(makers), sharding)]
        else:
            places = [_made_place(lowered, makers_of[i], devices) for i in at]
        places, leaf = _together(places)
        outputs.append(leaf.sharding)
        if len(at) > 1:
            results[n] = leaf
        for i, (worker, sharding) in zip(at, places, strict=True):
            value, makers, _, _ = makers_of[i]
            o = graph.outputs[i]
            ends[i] = ArrayPlace(worker, sharding, o.type.shape, o.type.dtype, value, makers)
    return (
        StepShardings(tuple(inputs), tuple(outputs)),
        tuple(origins[i] for i in range(len(graph.inputs))),
        tuple(ends[i] for i in range(len(graph.outputs))),
        leaves,
        results,
    )


def _together(places: list[tuple[int, NamedSharding]]) -> tuple[list[tuple[int, NamedSharding]], StackedLeaf]:
    """Place of a leaf's pieces between steps: on their stages if the leaf is made of them, else on the first."""
    leaf = StackedLeaf(tuple(sharding for _, sharding in places))
    if len(leaf.runs) > 1 and not leaf.is_direct:
        places = [places[0]] * len(places)
        leaf = StackedLeaf(tuple(sharding for _, sharding in places))
    return places, leaf


def made_outputs(lowered: LoweredPipeline) -> dict[int, tuple[str, tuple[int, ...], Port, int]]:
    """Name in the dataflow, makers, and layout at the first maker, by output of the step."""
    makers_of: dict[int, tuple[str, set[int], Port, int]] = {}
    for program in sorted(lowered.programs, key=lambda p: p.work):
        for port in program.writes:
            if port.ref.kind == "out":
                workers = lowered.table.workers_of_stage(program.work.stage)
                makers_of.setdefault(port.ref.number, (port.name, set(), port, program.work.stage))[1].update(workers)
    return {n: (name, tuple(sorted(ws)), port, stage) for n, (name, ws, port, stage) in makers_of.items()}


def _made_place(
    lowered: LoweredPipeline, makers_of: tuple[str, tuple[int, ...], Port, int], devices: Sequence[Any]
) -> tuple[int, NamedSharding]:
    """Worker and sharding of an output as it is made."""
    _, makers, port, stage = makers_of
    return makers[0], port.sharding(stage_mesh(lowered, makers[0], stage, devices))


def _microbatch_place(
    lowered: LoweredPipeline, name: str, shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding | None:
    """Sharding of a microbatch of an input: split as the input is where that is even, else whole."""
    dim = lowered.map.microbatching.batch.get(name)
    if dim is None:
        return None
    piece = (*shape[:dim], shape[dim] // lowered.table.num_microbatches, *shape[dim + 1 :])
    try:
        sharding.shard_shape(piece)
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _announced(traced: Traced, split_step: SplitStep, ends: Sequence[ArrayPlace]) -> list[Announced]:
    """Small results that are no state, but for keys."""
    return [
        Announced(at[0], o.type, ends[at[0]].sharding)
        for o, at in zip(traced.graph.outputs, split_step.outputs, strict=True)
        if not o.updates and len(at) == 1 and o.type.nbytes <= SMALL_BYTES and not o.type.dtype.startswith("key<")
    ]


def _memory(
    processes: World | None,
    name: str,
    lowered: LoweredPipeline,
    loaded: Mapping[tuple[int, Work], Loaded],
    step: StepLists,
) -> tuple[WorkerMemory, ...]:
    """Bytes of all workers on every process, which compare their lists on the way.

    Raises:
        ProcessMismatchError: a process has other lists.
        ProcessLostError: one did not come.
    """
    here = [
        (work.kind, work.stage, work.part, int(p.compiled.memory_analysis().temp_size_in_bytes))
        for (_, work), p in sorted(loaded.items(), key=lambda e: e[0])
        if p.compiled is not None
    ]
    everywhere = [here]
    if processes is not None:
        turn = Agreement.next(processes, f"the lists of {name}")
        order = hashlib.sha256(f"{step.lists}{step.order}".encode()).hexdigest()
        turn.compare([("order of instructions", order[:16])])
        everywhere = [msgspec.json.decode(raw) for raw in turn.gather(msgspec.json.encode(here))]
    temporaries: dict[Work, int] = {}
    for rows in everywhere:
        for kind, stage, part, size in rows:
            work = Work(kind, stage, part)
            temporaries[work] = max(size, temporaries.get(work, 0))
    return worker_memory(lowered.instructions, temporaries)
