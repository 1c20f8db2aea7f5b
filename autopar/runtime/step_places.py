"""Places of a step's inputs and outputs between steps, for a pipeline in one process or in several.

`places_of` is the place to start: an input lies on the worker of its first stage, an output where it is made, or where
the input is that it replaces. Leaves that hold the layers of several stages are in pieces, one on each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.lower.hosted import hosted_of, sharding_of
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stage_program import Port
from autopar.lower.program import stage_devices
from autopar.lower.split_layers import SplitStep
from autopar.runtime.loaded import StepShardings
from autopar.runtime.stacked import StackedLeaf
from autopar.runtime.stage_programs import stage_mesh
from autopar.runtime.step_lists import ArrayPlace
from autopar.schedule import ValueRef


@dataclass(frozen=True)
class StepPlaces:
    """Places of the inputs and outputs of a step.

    Args:
        shardings: of the function's inputs and outputs.
        origins: by input of the lowered step where it lies when a step begins.
        ends: likewise by output when it ends.
        leaves: by input of the function, where it is in pieces, how.
        results: likewise by output.
    """

    shardings: StepShardings
    origins: tuple[ArrayPlace, ...]
    ends: tuple[ArrayPlace, ...]
    leaves: Mapping[int, StackedLeaf]
    results: Mapping[int, StackedLeaf]


def places_of(
    lowered: LoweredPipeline,
    split_step: SplitStep,
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]],
    devices: Sequence[Any],
) -> StepPlaces:
    """Places of inputs and outputs of the step, whole and in pieces.

    Args:
        lowered: the pipeline.
        split_step: the step as it was lowered.
        ports: by (worker, value) how programs take it.
        devices: jax devices of all processes, in the order of the cluster.
    """
    content, graph = lowered.plan.content, split_step.step.graph
    meshes = [stage_devices(lowered.plan, s, devices) for s in range(lowered.plan.num_stages)]
    hosted, several = hosted_of(content), len({d.process_index for d in devices}) > 1
    origins: dict[int, ArrayPlace] = {}
    leaves: dict[int, StackedLeaf] = {}
    inputs: list[NamedSharding] = []
    for n, (at, record) in enumerate(zip(split_step.inputs, content.inputs, strict=True)):
        if len(at) == 1:
            sharding = sharding_of(record, meshes[record.stage], host=n in hosted.inputs)
            places = [(lowered.worker_of_stage(record.stage), sharding)]
        else:
            places = [_input_place(lowered, graph.inputs[i].name, ports, meshes) for i in at]
        places, leaf = _together(places, several)
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
        places, leaf = _together(places, several)
        outputs.append(leaf.sharding)
        if len(at) > 1:
            results[n] = leaf
        for i, (worker, sharding) in zip(at, places, strict=True):
            value, makers, _, _ = makers_of[i]
            o = graph.outputs[i]
            ends[i] = ArrayPlace(worker, sharding, o.type.shape, o.type.dtype, value, makers)
    return StepPlaces(
        StepShardings(tuple(inputs), tuple(outputs)),
        tuple(origins[i] for i in range(len(graph.inputs))),
        tuple(ends[i] for i in range(len(graph.outputs))),
        leaves,
        results,
    )


def _input_place(
    lowered: LoweredPipeline,
    name: str,
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]],
    meshes: Sequence[Mesh],
) -> tuple[int, NamedSharding]:
    """Worker and sharding of an input of the lowered step: as the first program of its first stage takes it."""
    stage = lowered.map.inputs[name][0]
    worker = lowered.worker_of_stage(stage)
    known = ports.get((worker, str(ValueRef("in", name, stage))))
    whole = NamedSharding(meshes[stage], PartitionSpec())
    return worker, whole if known is None else known[0].sharding(known[1])


def _together(
    places: list[tuple[int, NamedSharding]], several: bool
) -> tuple[list[tuple[int, NamedSharding]], StackedLeaf]:
    """Place of a leaf's pieces between steps: on their stages, or on the first.

    Args:
        places: worker and sharding of each piece on its stage.
        several: whether there are several processes, of which none can cut a leaf, or join one, that others have a part
            of: it has to be made of the stages' arrays.
    """
    leaf = StackedLeaf(tuple(sharding for _, sharding in places))
    if several and len(leaf.runs) > 1 and not leaf.is_direct:
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
