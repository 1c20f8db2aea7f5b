"""Compiles the pipeline of a plan as one XLA program for the devices of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.dtypes import jax_dtype
from autopar._compat.meshes import device_mesh, partition_spec
from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import CostModel
from autopar.frontend import Traced
from autopar.ir import Layout
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.grid import Axes, Grid, OneProgramError, grid_of
from autopar.lower.pipeline.one_program import OneProgram
from autopar.lower.pipeline.rounds import BufferCopy, Key, RoundMaker, Rounds, ShardedType
from autopar.lower.pipeline.stage_program import Port
from autopar.lower.program import plan_tables
from autopar.lower.split_layers import SplitStep
from autopar.plan import Plan
from autopar.runtime.hosts.arrays import spread
from autopar.runtime.hosts.lists_load import SMALL_BYTES, load_lists, made_outputs
from autopar.runtime.hosts.world_pipeline import Beginning, WorkerPart, WorldPipeline, sharding_on
from autopar.runtime.loaded import LoadedProgram, StepShardings, described_inputs
from autopar.runtime.local_pipeline import load_pipeline
from autopar.runtime.stacked import StackedLeaf
from autopar.schedule import Buffer, Task, ValueRef
from autopar.search.resharding import path_tables
from autopar.sharding.reshard import PathTables

#: Where a piece of a layered leaf lies: in what layout, on which worker.
_Place = tuple[ShardedType, int]


def load_stages(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    devices: Sequence[Any],
    donated: Sequence[int] = (),
    *,
    as_one: bool = False,
) -> LoadedProgram:
    """The pipeline of this process, or of all whose devices these are.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        lowered: its pipeline.
        devices: jax devices, in the order of the cluster.
        donated: indices of the inputs that the caller gives up.
        as_one: whether it is one XLA program on all devices, see `load_world`; else workers carry out their lists.
    """
    load = load_world if as_one else load_pipeline if jax.process_count() == 1 else load_lists
    return load(traced, split_step, lowered, devices, donated)


def load_world(
    traced: Traced, split_step: SplitStep, lowered: LoweredPipeline, devices: Sequence[Any], donated: Sequence[int] = ()
) -> WorldPipeline:
    """Compiles a pipeline for the devices of all processes.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        lowered: its pipeline.
        devices: jax devices of all processes, in the order of the cluster.
        donated: indices of the inputs that the caller gives up.

    Raises:
        OneProgramError: the plan cannot be one program on all devices.
    """
    grid, places, beginning, rounds = rounds_of(lowered, split_step)
    meshes = tuple(_mesh(grid, w, devices) for w in range(len(grid.workers)))
    everything = device_mesh(grid.axes, [devices[i] for i in grid.devices])
    stages = [lowered.mesh_axes(s) for s in range(lowered.table.num_stages)]
    programs = {p.work: p for p in lowered.programs}
    ends = _results(lowered, rounds.end, _homes(split_step, places))
    results = tuple(tuple(ends[i] for i in at) for at in split_step.outputs)
    shared = _shared(traced, rounds, results)
    tables = [_tables(lowered, grid, w) for w in range(len(grid.workers))]
    body = OneProgram(rounds, programs, tables, grid, stages, frozenset(k for _, k in ends.values()), shared)
    slots, executable = _compiled(body, everything)
    inputs = tuple(_joined([places[i] for i in at], meshes) for at in split_step.inputs)
    outputs = tuple(
        sharding_on(everything, body.everywhere(*shards_of_result[0]))
        if shards_of_result[0] in shared
        else _joined([(rounds.sharded[at], at[0]) for at in shards_of_result], meshes)
        for shards_of_result in results
    )
    count = len(traced.signature.traced)
    return WorldPipeline(
        *described_inputs(traced, donated),
        tuple(spread(c, c.dtype, s) for c, s in zip(traced.closed_over, inputs[count:], strict=True)),
        lowered,
        meshes,
        everything,
        body,
        executable,
        slots,
        beginning,
        StepShardings(inputs, outputs),
        results,
    )


def rounds_of(lowered: LoweredPipeline, split_step: SplitStep) -> tuple[Grid, list[_Place], Beginning, Rounds]:
    """The rounds of a pipeline as one program, on a grid, and what lies where when a step begins.

    Args:
        lowered: the pipeline.
        split_step: the step as it was lowered.

    Raises:
        OneProgramError: there are none.
    """
    grid = _grid(lowered)
    places = _places(lowered, split_step, grid)
    beginning, start = _beginning(lowered, split_step, grid, places)
    stages = [lowered.mesh_axes(s) for s in range(lowered.table.num_stages)]
    maker = RoundMaker(lowered.instructions, {p.work: p for p in lowered.programs}, grid, stages)
    rounds = maker.make(start, beginning.copies, _endings(lowered, _homes(split_step, places)))
    return grid, places, beginning, rounds


def _homes(split_step: SplitStep, places: Sequence[_Place]) -> dict[int, int]:
    """Worker of each output that is state at the beginning of a step."""
    return {n: places[i][1] for n, i in _updates(split_step).items()}


def _grid(lowered: LoweredPipeline) -> Grid:
    """The grid of a pipeline's workers. OneProgramError where it cannot be one program."""
    table = lowered.table
    ports = [p for program in lowered.programs for p in (*program.reads, *program.results)]
    reason = "the plan keeps values in host memory" if any(p.host for p in ports) else ""
    workers = []
    for worker in range(table.num_workers):
        device_sets = {lowered.devices(worker, s) for s in table.stages_of_worker(worker)}
        if len(device_sets) > 1:
            reason = f"worker {worker} has stages on different devices"
        workers.append(min(device_sets))
    if len({d for w in workers for d in w}) < sum(map(len, workers)):
        reason = "workers share devices"
    if reason:
        raise OneProgramError(
            f"the pipeline cannot be one program in several processes: {reason}",
            remedy="cluster=Cluster.ray(...), or num_stages=1, or another schedule or mesh_shape",
        )
    shapes = [[lowered.mesh_axes(s) for s in table.stages_of_worker(w)] for w in range(table.num_workers)]
    return grid_of(workers, shapes)


def _mesh(grid: Grid, worker: int, devices: Sequence[Any]) -> Mesh:
    """The devices of a worker, with the axes of the grid."""
    axes, (first, count) = grid.axes_of(worker), grid.workers[worker]
    mesh: Mesh = device_mesh(axes, [devices[i] for i in grid.devices[first : first + count]])
    return mesh


def _tables(lowered: LoweredPipeline, grid: Grid, worker: int) -> PathTables:
    """The ways from one layout to another on a worker: those of its plan where its mesh is that of its stages."""
    stage, axes = lowered.table.stages_of_worker(worker)[0], grid.axes_of(worker)
    part = Plan(lowered.plan.content.parts[stage])
    if axes == lowered.mesh_axes(stage):
        return plan_tables(part)
    cluster = Cluster.from_json(part.content.cluster)
    (stage_mesh,) = cluster.logical_meshes(tuple(n for _, n in lowered.mesh_axes(stage)))
    slowest = min(stage_mesh.links, key=lambda link: link.bandwidth)
    return path_tables(LogicalMesh(axes, (slowest,) * len(axes)), CostModel(cluster))


def _ports(lowered: LoweredPipeline) -> dict[tuple[int, str], tuple[Port, Axes]]:
    """Layout and mesh of the first program that reads a value, by (worker, name)."""
    ports: dict[tuple[int, str], tuple[Port, Axes]] = {}
    for program in lowered.programs:
        axes = lowered.mesh_axes(program.work.stage)
        for worker in lowered.table.workers_of_stage(program.work.stage):
            for port in program.reads:
                ports.setdefault((worker, port.name), (port, axes))
    return ports


def _places(lowered: LoweredPipeline, split_step: SplitStep, grid: Grid) -> list[_Place]:
    """Place of each input of the rewritten step when a step begins."""
    inputs, ports = split_step.step.graph.inputs, _ports(lowered)
    places: list[_Place] = []
    whole = {at[0]: n for n, at in enumerate(split_step.inputs) if len(at) == 1}
    for i, x in enumerate(inputs):
        if i in whole:
            record = lowered.plan.content.inputs[whole[i]]
            axes, layout, stage = lowered.mesh_axes(record.stage), Layout.parse(record.layout), record.stage
        else:
            stage = lowered.map.inputs[x.name][0]
            nothing = None, lowered.mesh_axes(stage)
            port, axes = ports.get((lowered.worker_of_stage(stage), str(ValueRef("in", x.name, stage))), nothing)
            layout = Layout.replicated(x.type.rank) if port is None else port.layout
        places.append((ShardedType(x.type, grid.layout(axes, layout)), lowered.worker_of_stage(stage)))
    return places


def _beginning(
    lowered: LoweredPipeline, split_step: SplitStep, grid: Grid, places: Sequence[_Place]
) -> tuple[Beginning, dict[tuple[int, Buffer], ShardedType]]:
    """Places and layouts of values at the beginning of a step."""
    inputs, batch, copies = _lies(lowered, {x.name: n for n, x in enumerate(split_step.step.graph.inputs)}, places)
    start = {at: places[i][0] for at, i in inputs.items()}
    ports = _ports(lowered)
    for at in batch:
        port, axes = ports[at[0], at[1].value]
        start[at] = ShardedType(port.type, grid.layout(axes, port.layout))
    parts: dict[int, WorkerPart] = {}
    for n, shards_of_result in enumerate(split_step.inputs):
        for i in shards_of_result:
            same = [j for j in shards_of_result if places[j][1] == places[i][1]]
            parts[i] = WorkerPart(n, same.index(i), len(same))
    beginning = Beginning(
        {at: parts[i] for at, i in inputs.items()}, {at: (parts[i].of, k) for at, (i, k) in batch.items()}, copies
    )
    return beginning, start


def _lies(
    lowered: LoweredPipeline, index: Mapping[str, int], places: Sequence[_Place]
) -> tuple[dict[tuple[int, Buffer], int], dict[tuple[int, Buffer], tuple[int, int]], tuple[BufferCopy, ...]]:
    """Input, or microbatch of one, in each (worker, buffer); an input with several readers is copied from its home."""
    table = lowered.table
    inputs: dict[tuple[int, Buffer], int] = {}
    batch: dict[tuple[int, Buffer], tuple[int, int]] = {}
    readers: dict[str, list[tuple[int, Buffer]]] = {name: [] for name in index}
    for value in lowered.instructions.dataflow.values:
        if not value.is_input:
            continue
        assert value.ref is not None, f"{value.name} is of no value of the step"
        name = value.ref.name
        for stage in value.stages:
            if value.ref.kind == "in":
                readers[name] += [(worker, Buffer(value.name)) for worker in table.workers_of_stage(stage)]
            else:
                for k in range(table.num_microbatches):
                    at = table.worker_of(Task("forward", stage, k)), Buffer(value.name, k)
                    batch[at] = index[name], k
    copies = []
    for name, some in readers.items():
        if not some:
            continue
        first_worker = places[index[name]][1]
        there = [at for at in some if at[0] == first_worker]
        # Where its home reads nothing of it, it lies there all the same, under a name of its own.
        source = there[0] if there else (first_worker, Buffer(f"home/{name}"))
        inputs[source] = index[name]
        inputs.update(dict.fromkeys(there, index[name]))
        copies += [
            BufferCopy(first_worker, source[1], worker, buffer) for worker, buffer in some if worker != first_worker
        ]
    return inputs, batch, tuple(copies)


def _updates(split_step: SplitStep) -> dict[int, int]:
    """Input of which an output of the rewritten step is the next value, by output that is state."""
    graph = split_step.step.graph
    index = {x.name: n for n, x in enumerate(graph.inputs)}
    return {n: index[o.updates] for n, o in enumerate(graph.outputs) if o.updates in index}


def _endings(lowered: LoweredPipeline, homes: Mapping[int, int]) -> list[BufferCopy]:
    """State that another worker makes than the one on which it lies when a step begins."""
    return [
        BufferCopy(min(workers), Buffer(name), homes[n], Buffer(name))
        for n, (name, workers, _, _) in sorted(made_outputs(lowered).items())
        if n in homes and homes[n] not in workers
    ]


def _results(
    lowered: LoweredPipeline, end: Sequence[Mapping[Key, int]], homes: Mapping[int, int]
) -> dict[int, tuple[int, Key]]:
    """Worker and value of each output: its place at the beginning of a step, if it is state."""
    ends: dict[int, tuple[int, Key]] = {}
    values = lowered.instructions.dataflow.by_name
    for worker, keys in enumerate(end):
        for key in keys:
            ref = values[key[0].value].ref if key[0].value in values else None
            if ref is not None and ref.kind == "out" and homes.get(ref.number, worker) == worker:
                ends.setdefault(ref.number, (worker, key))
    return ends


def _shared(
    traced: Traced, rounds: Rounds, results: Sequence[Sequence[tuple[int, Key]]]
) -> tuple[tuple[int, Key], ...]:
    """Small results that are no state: every process gets them."""
    return tuple(
        shards_of_result[0]
        for o, shards_of_result in zip(traced.graph.outputs, results, strict=True)
        if not o.updates
        and len(shards_of_result) == 1
        and o.type.nbytes <= SMALL_BYTES
        and not rounds.sharded[shards_of_result[0]].is_key
    )


def _joined(places: Sequence[_Place], meshes: Sequence[Mesh]) -> NamedSharding:
    """Sharding of a leaf with such shardings of its pieces along the first dim. OneProgramError where jax has none."""
    shardings = [sharding_on(meshes[worker], sharded) for sharded, worker in places]
    if len(shardings) == 1:
        return shardings[0]
    leaf = StackedLeaf(tuple(shardings))
    cut = any(count > 1 and len(s.spec) and s.spec[0] is not None for s, count in leaf.runs)
    if cut or (len(leaf.runs) > 1 and not leaf.is_direct):
        raise OneProgramError(
            "the pipeline cannot be one program in several processes: an array holds layers of several stages",
            cause="stages hold different numbers of its layers or shard them differently, or workers have several",
            remedy="stages of equally many layers and a schedule with one stage a worker, or a list of layers",
        )
    return leaf.sharding


def _compiled(body: OneProgram, mesh: Mesh) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """Operands of a body, and jax's compiled object."""
    spec = PartitionSpec(tuple(mesh.axis_names))
    slots = tuple(
        jax.ShapeDtypeStruct((n * mesh.size,), jax_dtype(d), sharding=NamedSharding(mesh, spec))
        for d, n in (body.rounds.slots[i] for i in body.begin)
    )
    everywhere: list[PartitionSpec] = [partition_spec(body.everywhere(*at).layout.dims) for at in body.shared]
    mapped = jax.shard_map(
        body.on_device,
        mesh=mesh,
        in_specs=(spec,) * len(slots),
        out_specs=(*(spec for _ in body.finish), *everywhere),
        check_vma=False,
    )
    executable = jax.jit(mapped, donate_argnums=tuple(range(len(slots)))).lower(*slots).compile()
    return slots, executable
