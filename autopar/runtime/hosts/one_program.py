"""A pipeline in processes that run one script, as one XLA program on all their devices; state on its stage's devices.

`load_world` compiles the one program, and `WorldPipeline` is what comes of it. Pipelines whose workers carry out
instruction lists are `autopar.runtime.pipeline`; the rounds of the one program are made in
`autopar.lower.pipeline.rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.dtypes import jax_dtype
from autopar._compat.meshes import device_mesh, partition_spec
from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import CostModel
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.ir import Layout
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.grid import Axes, Grid, OneProgramError, grid_of
from autopar.lower.pipeline.one_program import OneProgram, unpacked
from autopar.lower.pipeline.rounds import BufferCopy, Key, RoundMaker, Rounds, ShardedType, whole_key
from autopar.lower.pipeline.stage_program import Port
from autopar.lower.program import plan_tables
from autopar.lower.split_layers import SplitStep
from autopar.plan import Plan
from autopar.runtime.hosts.arrays import is_global, own, spread, whole
from autopar.runtime.hosts.callbacks import check_callbacks
from autopar.runtime.hosts.connections import open_connections
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, give_up
from autopar.runtime.loaded import LoadedStep, StepShardings, described_inputs
from autopar.runtime.pipeline import SMALL_BYTES
from autopar.runtime.stacked import StackedLeaf
from autopar.runtime.step_places import made_outputs
from autopar.schedule import Buffer, Task, ValueRef, Work
from autopar.search.resharding import path_tables
from autopar.sharding.reshard import PathTables

#: Where a piece of a layered leaf lies: in what layout, on which worker.
_Place = tuple[ShardedType, int]


@dataclass(frozen=True)
class WorkerPart:
    """An input or output, or a piece of one that holds the layers of several stages.

    Args:
        of: its index.
        number: which of the pieces in one place it is, along the first dim.
        count: how many there are.
    """

    of: int
    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class Beginning:
    """Places of values at the beginning of a step.

    Args:
        inputs: by (worker, buffer) the input that lies there.
        batch: by (worker, buffer) the index of an input of which it is a microbatch, and which one.
        copies: what workers send to each other first.
    """

    inputs: Mapping[tuple[int, Buffer], WorkerPart]
    batch: Mapping[tuple[int, Buffer], tuple[int, int]]
    copies: tuple[BufferCopy, ...]


@dataclass(frozen=True, eq=False)
class WorldPipeline(LoadedStep):
    """A pipeline on devices of several processes, compiled as one XLA program.

    Args:
        lowered: what it carries out.
        meshes: of each worker, with axes of the grid.
        mesh: of all workers.
        body: what runs on a device.
        executable: jax's compiled object.
        slots: shapes and shardings of its arguments.
        beginning: what lies where.
        program: where inputs and outputs lie.
        results: by output (worker, value) of each of its pieces, in order.
    """

    lowered: LoweredPipeline
    meshes: tuple[Mesh, ...]
    mesh: Mesh
    body: OneProgram
    executable: Any
    slots: tuple[jax.ShapeDtypeStruct, ...]
    beginning: Beginning
    program: StepShardings
    results: tuple[tuple[tuple[int, Key], ...], ...]
    worker_memory = ()

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the program needs."""
        m = self.executable.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
        return int(held)

    def timed(self, note: Callable[[Work, float], None]) -> WorldPipeline:
        """The same: parts of one program cannot be timed alone."""
        return self

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call: state on its stage, a batch as every process has it.

        Raises:
            AutoparError: a leaf was donated to an earlier call, has no data, or lies on devices of other processes.
        """
        batch = {n for n, _ in self.beginning.batch.values()}
        return [self._place(n, leaf, n in batch) for n, leaf in enumerate(leaves)]

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` where the step's ``inputs`` lie."""
        return [self._place(n, a, False) for n, a in zip(inputs, function(*arguments), strict=True)]

    def _place(self, index: int, leaf: Any, batch: bool) -> Any:
        check_data(leaf, self.names[index])
        wanted = self.program.input_shardings[index]
        if batch:
            # Every process cuts microbatches of its own stages; to the one that has a whole stage its array is its own.
            lies = isinstance(leaf, jax.Array) and (is_global(leaf) or leaf.sharding == wanted)
            return own(whole(leaf) if lies else leaf, self.entries[index][1])
        if is_global(leaf):
            if leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                return leaf
            if leaf.sharding.device_set == wanted.device_set:
                if wanted.addressable_devices:
                    return jax.device_put(leaf, wanted)
                return jax.make_array_from_single_device_arrays(leaf.shape, wanted, [], dtype=leaf.dtype)
            raise AutoparError(
                f"{self.names[index]} lies on devices of several processes, and not where its stage wants it",
                cause="it was made before the step was compiled, or by another plan",
                remedy="call .compile(shapes) before .init, or .restore a checkpoint",
            )
        if isinstance(leaf, jax.Array) and leaf.sharding == wanted:
            return leaf
        return spread(leaf, self.entries[index][1], wanted, copy=True)

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step; see `autopar.runtime.loaded.LoadedProgram`."""
        with LAUNCHES:
            inputs = [*placed, *self.constants]
            filled = self.executable(*self._slots(inputs))
            give_up(leaves, self.donated)
            give_up(placed, self.donated)
        slots = dict(zip(self.body.finish, filled[: len(self.body.finish)], strict=True))
        shared = dict(zip(self.body.shared, filled[len(slots) :], strict=True))
        results = []
        for shards_of_result, wanted in zip(self.results, self.program.output_shardings, strict=True):
            results.append(
                shared[shards_of_result[0]]
                if shards_of_result[0] in shared
                else self._result(shards_of_result, wanted, slots)
            )
        check_callbacks(self.lowered.callbacks, results)
        return results

    def _slots(self, inputs: Sequence[Any]) -> list[Any]:
        rounds = self.body.rounds
        parts: dict[tuple[int, Any], Any] = {}

        def put(worker: int, buffer: Buffer, array: Any, part: WorkerPart) -> None:
            slot = rounds.start[worker][whole_key(buffer)]
            mesh_devices = set(self.meshes[worker].devices.flat)
            for shard in array.addressable_shards:
                if shard.device in mesh_devices:
                    parts[slot, shard.device] = _padded(_piece(shard.data, part), rounds.slots[slot][1])

        for (worker, buffer), part in self.beginning.inputs.items():
            put(worker, buffer, inputs[part.of], part)
        for (worker, buffer), (n, k) in self.beginning.batch.items():
            sharded = rounds.sharded[worker, whole_key(buffer)]
            name = self.lowered.instructions.dataflow.by_name[buffer.value].ref
            assert name is not None
            dim = self.lowered.map.microbatching.batch[name.name]
            size = sharded.type.shape[dim]
            piece = np.take(inputs[n], range(k * size, (k + 1) * size), axis=dim)
            put(
                worker,
                buffer,
                spread(piece, piece.dtype, sharding_on(self.meshes[worker], sharded), copy=False),
                WorkerPart(n),
            )
        given = []
        for n, like in zip(self.body.begin, self.slots, strict=True):
            shards_of_result = [
                parts[n, d] if (n, d) in parts else jax.device_put(np.zeros(rounds.slots[n][1], like.dtype), d)
                for d in self.mesh.local_devices
            ]
            given.append(jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards_of_result))
        return given

    def _result(
        self, shards_of_result: Sequence[tuple[int, Key]], wanted: NamedSharding, slots: Mapping[int, Any]
    ) -> Any:
        """An output from its pieces, which lie one after another along the first dim."""
        by_device: dict[Any, list[Any]] = {}
        shape: tuple[int, ...] = ()
        for worker, key in shards_of_result:
            sharded = self.body.rounds.sharded[worker, key]
            rows = sharded.type.shape[0] if len(shards_of_result) > 1 else 0
            shape = (shape[0] + rows, *shape[1:]) if shape else sharded.type.shape
            mesh_devices = set(self.meshes[worker].devices.flat)
            for shard in slots[self.body.rounds.end[worker][key]].addressable_shards:
                if shard.device in mesh_devices:
                    by_device.setdefault(shard.device, []).append(unpacked(shard.data, sharded, self.body.sizes))
        shards = [some[0] if len(some) == 1 else jnp.concatenate(some) for some in by_device.values()]
        dtype = jax_dtype(self.body.rounds.sharded[shards_of_result[0]].type.dtype)
        return jax.make_array_from_single_device_arrays(shape, wanted, shards, dtype=dtype)


def sharding_on(mesh: Mesh, sharded: ShardedType) -> NamedSharding:
    """Sharding of a value on the mesh of a worker."""
    spec: PartitionSpec = partition_spec(sharded.layout.dims)
    return NamedSharding(mesh, spec)


def _piece(shard: Any, part: WorkerPart) -> Any:
    if part.count == 1:
        return shard
    size = shard.shape[0] // part.count
    return shard[part.number * size : (part.number + 1) * size]


def _padded(array: Any, size: int) -> Any:
    numbers = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    flat = numbers.reshape(-1)
    return jnp.pad(flat, (0, size - flat.size))  # a new array: what is given is written over


def load_world(
    traced: Traced, split_step: SplitStep, lowered: LoweredPipeline, devices: Sequence[Any], donated: Sequence[int] = ()
) -> WorldPipeline:
    """Compiles a pipeline for the devices of all processes.

    Arguments are those of `autopar.runtime.pipeline.load_pipeline`.

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
    kept = frozenset(k for _, k in ends.values())
    body = OneProgram(rounds, programs, tables, grid, stages, kept, shared, gathers=devices[0].platform == "cpu")
    slots, executable = _compiled(body, everything)
    open_connections([everything])
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
