"""A pipeline in processes that run one script: one XLA program on all their devices, state on its stage's devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar._compat.dtypes import jax_dtype
from autopar._compat.trees import partition_spec
from autopar.errors import AutoparError, ClusterError
from autopar.frontend import Traced
from autopar.ir import Layout
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.one_program import WORKERS, OneProgram
from autopar.lower.pipeline.rounds import Copy, Key, Lying, RoundMaker, whole_key
from autopar.lower.program import plan_tables
from autopar.lower.split_layers import SplitStep
from autopar.plan import Plan
from autopar.runtime.hosts.arrays import is_global, spread
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, fits, give_up
from autopar.runtime.local_pipeline import PipelineProgram, load_pipeline
from autopar.schedule import Buffer, Task, Work
from autopar.schedule.memory import WorkerMemory

#: Elements of a result that is no state up to which every process gets it.
_SMALL = 1 << 16


@dataclass(frozen=True, eq=False)
class WorldShardings:
    """Where inputs and outputs lie."""

    input_shardings: tuple[NamedSharding, ...]
    output_shardings: tuple[NamedSharding, ...]


@dataclass(frozen=True)
class Beginning:
    """What lies where when a step begins.

    Args:
        inputs: by (worker, buffer) the index of the input that lies there.
        batch: by (worker, buffer) the index of an input of which it is a microbatch, and which one.
        copies: what workers send to each other first.
    """

    inputs: Mapping[tuple[int, Buffer], int]
    batch: Mapping[tuple[int, Buffer], tuple[int, int]]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, eq=False)
class WorldPipeline:
    """A compiled pipeline of several processes; see `autopar.runtime.loaded.LoadedProgram`.

    Args:
        lowered: what it carries out.
        meshes: of each worker.
        mesh: of all workers.
        body: what runs on a device.
        executable: jax's compiled object.
        slots: shapes and shardings of its arguments.
        beginning: what lies where.
        program: where inputs and outputs lie.
        entries: (shape, dtype, weak type) of each input.
        names: path of each input.
        donated: indices of inputs that the caller gives up.
        constants: arrays that the function closes over.
        results: (worker, value) of each output.
    """

    lowered: LoweredPipeline
    meshes: tuple[Mesh, ...]
    mesh: Mesh
    body: OneProgram
    executable: Any
    slots: tuple[jax.ShapeDtypeStruct, ...]
    beginning: Beginning
    program: WorldShardings
    entries: tuple[Any, ...]
    names: tuple[str, ...]
    donated: tuple[int, ...]
    constants: tuple[Any, ...]
    results: tuple[tuple[int, Key], ...]

    @property
    def here(self) -> bool:
        """Whether its results are jax's arrays: yes."""
        return True

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Of one program there is no memory of single workers."""
        return ()

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the program needs."""
        m = self.executable.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
        return int(held)

    def timed(self, note: Callable[[Work, float], None]) -> WorldPipeline:
        """The same: parts of one program cannot be timed alone."""
        return self

    def match(self, leaves: Sequence[Any]) -> list[Any] | None:
        """``leaves`` placed, if their shapes and dtypes are those of the program; else None."""
        return self.place_all(leaves) if fits(leaves, self.entries) else None

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call: state on its stage, a batch as every process has it.

        Raises:
            AutoparError: a leaf was donated to an earlier call, has no data, or lies on devices of other processes.
        """
        batch = {n for n, _ in self.beginning.batch.values()}
        return [self._place(n, leaf, n in batch) for n, leaf in enumerate(leaves)]

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """As `place_all`."""
        return self.place_all(leaves)

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` where the step's ``inputs`` lie."""
        return [self._place(n, a, False) for n, a in zip(inputs, function(*arguments), strict=True)]

    def _place(self, index: int, leaf: Any, batch: bool) -> Any:
        check_data(leaf, self.names[index])
        wanted = self.program.input_shardings[index]
        if is_global(leaf):
            if not batch and leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                return leaf
            if not batch and leaf.sharding.device_set == wanted.device_set:
                if wanted.addressable_devices:
                    return jax.device_put(leaf, wanted)
                return jax.make_array_from_single_device_arrays(leaf.shape, wanted, [], dtype=leaf.dtype)
            raise AutoparError(
                f"{self.names[index]} lies on devices of several processes, and not where its stage wants it",
                cause="a batch of a pipeline is the same on every process; state was made before the step was compiled",
                remedy="pass the batch as numpy arrays, and call .compile(shapes) before .init",
            )
        if batch:
            return np.asarray(leaf, self.entries[index][1])
        if isinstance(leaf, jax.Array) and leaf.sharding == wanted:
            return leaf
        return spread(leaf, self.entries[index][1], wanted, copy=True)

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """
        with LAUNCHES:
            inputs = [*placed, *self.constants]
            made = self.executable(*self._slots(inputs))
            give_up(leaves, self.donated)
            give_up(placed, self.donated)
        finish = self.body.finish
        shared = dict(zip(self.body.shared, made[len(finish) :], strict=True))
        found = []
        for worker, key in self.results:
            slot = self.body.rounds.end[worker][key]
            whole = shared.get((worker, key))
            found.append(self._result(worker, key, made[finish.index(slot)]) if whole is None else whole)
        return found

    def _slots(self, inputs: Sequence[Any]) -> list[Any]:
        rounds = self.body.rounds
        parts: dict[tuple[int, Any], Any] = {}

        def put(worker: int, buffer: Buffer, array: Any) -> None:
            slot = rounds.start[worker][whole_key(buffer)]
            for shard in array.addressable_shards:
                parts[slot, shard.device] = _padded(shard.data, rounds.slots[slot][1])

        for (worker, buffer), n in self.beginning.inputs.items():
            put(worker, buffer, inputs[n])
        for (worker, buffer), (n, k) in self.beginning.batch.items():
            lying = rounds.lying[worker, whole_key(buffer)]
            name = self.lowered.instructions.dataflow.by_name[buffer.value].ref
            assert name is not None
            dim = self.lowered.map.found.batch[name.name]
            size = lying.type.shape[dim]
            piece = np.take(inputs[n], range(k * size, (k + 1) * size), axis=dim)
            put(worker, buffer, spread(piece, piece.dtype, _sharding(self.meshes[worker], lying), copy=False))
        given = []
        for n, like in zip(self.body.begin, self.slots, strict=True):
            pieces = [
                parts[n, d] if (n, d) in parts else jax.device_put(np.zeros(rounds.slots[n][1], like.dtype), d)
                for d in self.mesh.local_devices
            ]
            given.append(jax.make_array_from_single_device_arrays(like.shape, like.sharding, pieces))
        return given

    def _result(self, worker: int, key: Key, slot: Any) -> Any:
        lying = self.body.rounds.lying[worker, key]
        shape = lying.shape(self.body.sizes)
        size = int(np.prod(shape, dtype=np.int64))
        own = set(self.meshes[worker].devices.flat)
        shards = [s.data[:size].reshape(shape) for s in slot.addressable_shards if s.device in own]
        wanted = _sharding(self.meshes[worker], lying)
        return jax.make_array_from_single_device_arrays(lying.type.shape, wanted, shards, dtype=slot.dtype)


def load_stages(
    traced: Traced, split_step: SplitStep, lowered: LoweredPipeline, devices: Sequence[Any], donated: Sequence[int] = ()
) -> WorldPipeline | PipelineProgram:
    """The pipeline of this process, or of all where the devices are those of several; see `load_world`."""
    load = load_pipeline if jax.process_count() == 1 else load_world
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
        ClusterError: the plan cannot be one program on all devices.
    """
    reason = why_not(lowered, split_step)
    if reason:
        raise ClusterError(
            f"the pipeline cannot be one program in several processes: {reason}",
            remedy="cluster=Cluster.ray(...), or num_stages=1, or another schedule or mesh_shape",
        )
    table, content = lowered.table, lowered.plan.content
    stage_of = [table.stages_of_worker(w)[0] for w in range(table.num_workers)]
    meshes = tuple(_mesh(lowered, s, devices) for s in stage_of)
    grid = np.stack([m.devices for m in meshes])
    mesh = Mesh(grid, (WORKERS, *meshes[0].axis_names), axis_types=(AxisType.Auto,) * grid.ndim)
    sizes = {str(a): int(n) for a, n in meshes[0].shape.items()}
    beginning = _beginning(lowered, split_step)
    start = {at: Lying(traced.graph.inputs[n].type, Layout.parse(content.inputs[n].layout))
             for at, n in beginning.inputs.items()}  # fmt: skip
    ports = {(w, p.name): p for program in lowered.programs for w in table.workers_of_stage(program.work.stage)
             for p in program.reads}  # fmt: skip
    start |= {at: Lying(ports[at[0], at[1].value].type, ports[at[0], at[1].value].layout) for at in beginning.batch}
    maker = RoundMaker(lowered.instructions, {p.work: p for p in lowered.programs}, sizes)
    homes = _homes(traced, lowered)
    rounds = maker.make(start, beginning.copies, _endings(lowered, homes))
    results = _results(lowered, rounds.end, homes)
    small = {n for n, o in enumerate(traced.graph.outputs) if not o.updates and o.type.nbytes <= _SMALL}
    shared = tuple((w, k) for n, (w, k) in sorted(results.items()) if n in small)
    tables = [plan_tables(Plan(content.parts[s])) for s in stage_of]
    outs = frozenset(key for _, key in results.values())
    body = OneProgram(rounds, {p.work: p for p in lowered.programs}, tables, sizes, outs, shared)
    slots, executable = _compiled(body, mesh)
    inputs = tuple(
        NamedSharding(meshes[lowered.worker_of_stage(r.stage)], _spec(Layout.parse(r.layout))) for r in content.inputs
    )  # fmt: skip
    outputs = tuple(
        NamedSharding(mesh if results[n] in shared else meshes[results[n][0]], _spec(rounds.lying[results[n]].layout))
        for n in sorted(results)
    )
    count = len(traced.signature.traced)
    constants = tuple(spread(c, c.dtype, s, copy=True) for c, s in zip(traced.closed_over, inputs[count:], strict=True))
    entries = tuple(traced.signature.entries[i] for i in traced.signature.traced)
    names = tuple(i.name for i in traced.graph.inputs)
    shardings = WorldShardings(inputs, outputs)
    return WorldPipeline(
        lowered, meshes, mesh, body, executable, slots, beginning, shardings, entries, names, tuple(sorted(donated)),
        constants, tuple(results[n] for n in sorted(results)),
    )  # fmt: skip


def _compiled(body: OneProgram, mesh: Mesh) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """What a body takes, and jax's compiled object."""
    spec = PartitionSpec((WORKERS, *mesh.axis_names[1:]))
    slots = tuple(
        jax.ShapeDtypeStruct((n * mesh.size,), jax_dtype(d), sharding=NamedSharding(mesh, spec))
        for d, n in (body.rounds.slots[i] for i in body.begin)
    )
    everywhere = tuple(body.rounds.lying[at].layout for at in body.shared)
    out_specs = (*(spec for _ in body.finish), *(_spec(k) for k in everywhere))
    mapped = jax.shard_map(
        body.on_device, mesh=mesh, in_specs=(spec,) * len(slots), out_specs=out_specs, check_vma=False
    )
    executable = jax.jit(mapped, donate_argnums=tuple(range(len(slots)))).lower(*slots).compile()
    return slots, executable


def why_not(lowered: LoweredPipeline, split_step: SplitStep) -> str:
    """Why a pipeline cannot be one program on all devices; "" where it can."""
    table = lowered.table
    axes = {lowered.mesh_axes(s) for s in range(table.num_stages)}
    ports = [p for program in lowered.programs for p in (*program.reads, *program.results)]
    if len(axes) > 1:
        return f"stages have meshes of different shapes: {', '.join(sorted(map(str, axes)))}"
    if any(len(table.workers_of_stage(s)) > 1 for s in range(table.num_stages)):
        return "a stage has two workers"
    for worker in range(table.num_workers):
        if len({lowered.devices(worker, s) for s in table.stages_of_worker(worker)}) > 1:
            return f"worker {worker} has stages on different devices"
    if any(len(at) > 1 for at in (*split_step.inputs, *split_step.outputs)):
        return "layers of several stages lie in one array"
    if any(p.host for p in ports):
        return "something lies in host memory"
    return "it passes on random keys" if any("key" in p.type.dtype for p in ports) else ""


def _beginning(lowered: LoweredPipeline, split_step: SplitStep) -> Beginning:
    """What lies where; an input that several workers read lies on the one of its home stage, which copies it."""
    table, dataflow = lowered.table, lowered.instructions.dataflow
    index = {i.name: n for n, i in enumerate(split_step.step.graph.inputs)}
    inputs: dict[tuple[int, Buffer], int] = {}
    batch: dict[tuple[int, Buffer], tuple[int, int]] = {}
    readers: dict[str, list[tuple[int, Buffer]]] = {}
    for value in dataflow.values:
        if not value.is_input:
            continue
        assert value.ref is not None, f"{value.name} is of no value of the step"
        name = value.ref.name
        for stage in value.stages:
            if value.ref.kind == "in":
                for worker in table.workers_of_stage(stage):
                    readers.setdefault(name, []).append((worker, Buffer(value.name)))
            else:
                for k in range(table.num_microbatches):
                    at = table.worker_of(Task("forward", stage, k)), Buffer(value.name, k)
                    batch[at] = index[name], k
    copies = []
    for name, some in readers.items():
        home = lowered.worker_of_stage(lowered.map.inputs[name][0])
        there = [at for at in some if at[0] == home]
        # Where its home reads nothing of it, it lies there all the same, under a name of its own.
        source = there[0] if there else (home, Buffer(f"home/{name}"))
        inputs[source] = index[name]
        inputs.update(dict.fromkeys(there, index[name]))
        copies += [Copy(home, source[1], worker, buffer) for worker, buffer in some if worker != home]
    return Beginning(inputs, batch, tuple(copies))


def _homes(traced: Traced, lowered: LoweredPipeline) -> dict[int, int]:
    """By output that is state the worker on which its input lies."""
    stages = {i.name: r.stage for i, r in zip(traced.graph.inputs, lowered.plan.content.inputs, strict=True)}
    return {
        n: lowered.worker_of_stage(stages[o.updates]) for n, o in enumerate(traced.graph.outputs) if o.updates in stages
    }


def _endings(lowered: LoweredPipeline, homes: Mapping[int, int]) -> list[Copy]:
    """State that another worker makes than the one on which it lies when a step begins."""
    makers: dict[int, tuple[str, set[int]]] = {}
    for program in lowered.programs:
        for port in program.writes:
            if port.ref.kind == "out":
                workers = set(lowered.table.workers_of_stage(program.work.stage))
                makers.setdefault(port.ref.number, (port.name, set()))[1].update(workers)
    return [
        Copy(min(workers), Buffer(name), homes[n], Buffer(name))
        for n, (name, workers) in sorted(makers.items())
        if n in homes and homes[n] not in workers
    ]


def _results(
    lowered: LoweredPipeline, end: Sequence[Mapping[Key, int]], homes: Mapping[int, int]
) -> dict[int, tuple[int, Key]]:
    """By output the worker and the value there: where it lies when a step begins, if it is state."""
    found: dict[int, tuple[int, Key]] = {}
    values = lowered.instructions.dataflow.by_name
    for worker, keys in enumerate(end):
        for key in keys:
            ref = values[key[0].value].ref if key[0].value in values else None
            if ref is not None and ref.kind == "out" and homes.get(ref.number, worker) == worker:
                found.setdefault(ref.number, (worker, key))
    return found


def _mesh(lowered: LoweredPipeline, stage: int, devices: Sequence[Any]) -> Mesh:
    axes = lowered.mesh_axes(stage)
    chosen = np.array([devices[i] for i in lowered.plan.stages[stage].devices], dtype=object)
    return Mesh(
        chosen.reshape([n for _, n in axes]), tuple(a for a, _ in axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def _spec(layout: Layout) -> PartitionSpec:
    spec: PartitionSpec = partition_spec(layout.dims)
    return spec


def _sharding(mesh: Mesh, lying: Lying) -> NamedSharding:
    return NamedSharding(mesh, _spec(lying.layout))


def _padded(array: Any, size: int) -> Any:
    return jnp.pad(array.reshape(-1), (0, size - array.size))  # a new array: what is given is written over
