"""A compiled pipeline on this process's devices, with the face of `autopar.runtime.LocalProgram`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import device_mesh
from autopar.frontend import Traced
from autopar.ir.analysis import unread_inputs
from autopar.lower.hosted import check_host_memory, hosted_of, sharding_of
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stage_program import Port, given_up
from autopar.lower.program import stage_devices
from autopar.lower.split_layers import SplitStep
from autopar.plan import PlanContent
from autopar.runtime.hosts.agree import wait_s
from autopar.runtime.hosts.arrays import copied, own
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, check_donated, give_up
from autopar.runtime.loaded import LoadedStep, StepShardings, described_inputs
from autopar.runtime.pipeline import Loaded, LocalPipeline, clocked
from autopar.runtime.stacked import StackedLeaf
from autopar.schedule import Buffer, Task, ValueRef, ValueSpec, Work
from autopar.schedule.memory import WorkerMemory, worker_memory


@dataclass(frozen=True, eq=False)
class LoadedPipeline(LoadedStep):
    """A pipeline, loaded: of this process, or its part of one of several processes.

    Args:
        lowered: what it runs.
        program: where inputs and outputs lie.
        split_step: which inputs and outputs are in pieces.
        leaves: by input, where it is in pieces, how.
        results: likewise by output.
        unread: indices of inputs that nothing reads; they stay where they lie.
    """

    lowered: LoweredPipeline
    program: StepShardings
    split_step: SplitStep
    leaves: Mapping[int, StackedLeaf]
    results: Mapping[int, StackedLeaf]
    unread: frozenset[int]

    def inputs_of(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Inputs of the lowered step by index, of some leaves by index."""
        flat: dict[int, Any] = {}
        for n, array in leaves.items():
            at = self.split_step.inputs[n]
            whole = n not in self.leaves or n in self.unread
            flat |= zip(at, [array] * len(at) if whole else self.leaves[n].split(array), strict=True)
        return flat

    def by_name(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Arrays of the lowered step's inputs by name, from those of the function and what it closes over."""
        flat = self.inputs_of(dict(enumerate(inputs)))
        return {x.name: flat[i] for i, x in enumerate(self.split_step.step.graph.inputs)}

    def without_aliases(self, inputs: Sequence[Any]) -> list[Any]:
        """``inputs``, with a copy for each that is given up, to be written over, and is the same array as another."""
        same = Counter(map(id, inputs))  # arrays are no keys: their values compare
        return [
            jnp.copy(a) if n in self.donated and same[id(a)] > 1 and a.sharding.addressable_devices else a
            for n, a in enumerate(inputs)
        ]

    def join(self, number: int, parts: Sequence[Any]) -> Any:
        """A result of the function from its outputs of the lowered step."""
        return self.results[number].join(parts) if len(parts) > 1 else parts[0]

    def joined(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Results of the function from outputs of the lowered step by number."""
        return [self.join(n, [outputs[i] for i in at]) for n, at in enumerate(self.split_step.outputs)]


@dataclass(frozen=True, eq=False)
class PipelineProgram(LoadedPipeline):
    """A pipeline on this process's devices, loaded.

    Args:
        runtime: interprets its instructions.
    """

    runtime: LocalPipeline

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """The traced leaves of a call, each on the stage that has it first."""
        return [self._place(i, leaf) for i, leaf in enumerate(leaves)]

    def _place(self, index: int, leaf: Any) -> Any:
        check_data(leaf, self.names[index])
        if index in self.unread:
            return leaf
        if isinstance(leaf, jax.Array):
            wanted = self.program.input_shardings[index]
            if leaf.sharding == wanted:
                return leaf
            moved = jax.device_put(leaf, wanted)
            # What is given up is written over. The piece on the device that had it all may be the caller's own buffer,
            # and that of another argument; `may_alias` does not keep them apart.
            return copied(moved) if index in self.donated else moved
        return jax.device_put(own(leaf, self.entries[index][1]), self.program.input_shardings[index])

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Results of ``function`` where the step's ``inputs`` lie; see `autopar.runtime.loaded.LoadedProgram`."""
        arrays = jax.jit(function)(*arguments)
        return [jax.device_put(a, self.program.input_shardings[n]) for a, n in zip(arrays, inputs, strict=True)]

    def run(self, placed: list[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """
        with LAUNCHES.of(self):
            check_donated(leaves, self.names, self.donated)
            try:
                store = self.runtime.run(self._start([*placed, *self.constants]))
            except jax.errors.JaxRuntimeError:
                self.lowered.callbacks.raise_stuck()
                raise
            results: dict[int, Any] = {}
            values = self.lowered.instructions.dataflow.by_name
            for (_, buffer), array in store.arrays.items():
                ref = values[buffer.value].ref
                if ref is not None and ref.kind == "out":
                    results.setdefault(ref.number, array)
            give_up(leaves, self.donated)
            joined = self.joined(results)
            LAUNCHES.launched(joined)
        if self.lowered.callbacks.guards:
            self.lowered.callbacks.check(joined)
        return joined

    def _start(self, inputs: Sequence[Any]) -> dict[tuple[int, Buffer], Any]:
        """Values on each worker at the beginning of the step."""
        by_name = self.by_name(self.without_aliases(inputs))
        start: dict[tuple[int, Buffer], Any] = {}
        table = self.lowered.table
        lies: set[tuple[int, str]] = set()
        for value in self.lowered.instructions.dataflow.values:
            if not value.is_input:
                continue
            assert value.ref is not None, f"{value.name} is of no value of the step"
            name = value.ref.name
            array = by_name[name]
            if value.ref.kind == "in":
                for worker in sorted({w for s in value.stages for w in table.workers_of_stage(s)}):
                    safe = jnp.copy(array) if value.donated and (worker, name) in lies else array
                    start[worker, Buffer(value.name)] = self.put(worker, value.name, safe)
                    lies.add((worker, name))
            else:
                self.put_microbatches(start, value, name, array)
        return start

    def put_microbatches(self, start: dict[tuple[int, Buffer], Any], value: ValueSpec, name: str, array: Any) -> None:
        """Adds to ``start`` the microbatches' pieces of an input of the step, on the workers that read ``value``."""
        table = self.lowered.table
        dim = self.lowered.map.microbatching.batch[name]
        size = array.shape[dim] // table.num_microbatches
        for k in range(table.num_microbatches):
            piece = jax.lax.slice_in_dim(array, k * size, (k + 1) * size, axis=dim)
            for stage in value.stages:
                worker = table.worker_of(Task("forward", stage, k))
                start[worker, Buffer(value.name, k)] = self.put(worker, value.name, piece)

    def put(self, worker: int, name: str, array: Any) -> Any:
        """``array`` as the programs of a worker take the value of that name."""
        port, mesh = self.runtime.ports[worker, name]
        wanted = port.sharding(mesh)
        return array if array.sharding == wanted else jax.device_put(array, wanted)

    def timed(self, note: Callable[[Work, float], None]) -> PipelineProgram:
        """This pipeline, with every program waited for.

        Args:
            note: called with each program that ran and its seconds.
        """
        runtime = LocalPipeline(self.runtime.program, {k: clocked(v, note) for k, v in self.runtime.loaded.items()})
        return dataclasses.replace(self, runtime=runtime)

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Bytes a device of each worker when its list of instructions needs the most."""
        temporaries: dict[Work, int] = {}
        for loaded in self.runtime.loaded.values():
            if loaded.compiled is not None:
                temporaries[loaded.program.work] = int(loaded.compiled.memory_analysis().temp_size_in_bytes)
        return worker_memory(self.runtime.program, temporaries)

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the worker which needs most needs when it needs the most."""
        return max((m.total for m in self.worker_memory), default=0)

    @property
    def executable(self) -> LoadedTexts:
        """Texts and memory of all programs."""
        return LoadedTexts(self.runtime.loaded)


@dataclass(frozen=True, eq=False)
class LoadedTexts:
    """The interface of jax's compiled object that `Compiled` uses, for all programs of a pipeline in this process.

    Args:
        loaded: programs by (worker, work).
    """

    loaded: Mapping[tuple[int, Work], Loaded]

    def as_text(self) -> str:
        """Optimized HLO of every stage program, one behind the other."""
        return "\n".join(f"// {name}\n{compiled.as_text()}" for name, compiled in self._by_program.items())

    def memory_analysis(self) -> dict[str, Any]:
        """jax's memory statistics (bytes a device) by program."""
        return {name: compiled.memory_analysis() for name, compiled in self._by_program.items()}

    def cost_analysis(self) -> dict[str, Any]:
        """jax's cost statistics by program."""
        return {name: compiled.cost_analysis() for name, compiled in self._by_program.items()}

    @property
    def _by_program(self) -> dict[str, Any]:
        return {
            f"{work} on worker {worker}": loaded.compiled
            for (worker, work), loaded in sorted(self.loaded.items(), key=lambda e: e[0])
            if loaded.program.results
        }


def load_pipeline(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    devices: Sequence[Any],
    donated: Sequence[int] = (),
    *,
    spared: Set[str] = frozenset(),
) -> PipelineProgram:
    """Compiles a pipeline for this process's devices.

    Args:
        traced: the function.
        split_step: its step as it was lowered.
        lowered: its pipeline.
        devices: jax devices, in the order of the cluster.
        donated: indices of the inputs that the caller gives up.
        spared: values into whose buffers no program may write.

    Raises:
        ClusterError: there are not as many devices as the plan wants.
        PlanMismatchError: the plan keeps something in host memory that the devices have no access to.
    """
    lowered.callbacks.limit_s = wait_s()
    runtime = LocalPipeline(lowered.instructions, compiled_stages(lowered, worker_meshes(lowered, devices), spared))
    check_host_memory(lowered.plan.content, devices)
    meshes = [stage_devices(lowered.plan, s, devices) for s in range(lowered.plan.num_stages)]
    inputs = [input_place(lowered, i.name, runtime.ports, meshes)[1] for i in split_step.step.graph.inputs]
    places = _result_places(runtime)
    leaves = {n: StackedLeaf(tuple(inputs[i] for i in at)) for n, at in enumerate(split_step.inputs) if len(at) > 1}
    results = {n: StackedLeaf(tuple(places[i] for i in at)) for n, at in enumerate(split_step.outputs) if len(at) > 1}
    shardings = _shardings(lowered.plan.content, meshes, leaves, results)
    count = len(traced.signature.traced)
    constants = tuple(
        jax.device_put(copied(c), s) for c, s in zip(traced.closed_over, shardings.input_shardings[count:], strict=True)
    )
    return PipelineProgram(
        *described_inputs(traced, donated),
        constants,
        lowered,
        shardings,
        split_step,
        leaves,
        results,
        unread_inputs(traced.graph) - set(donated),
        runtime,
    )


def input_place(
    lowered: LoweredPipeline,
    name: str,
    ports: Mapping[tuple[int, str], tuple[Port, Mesh]],
    meshes: Sequence[Mesh],
) -> tuple[int, NamedSharding]:
    """Worker and sharding of an input of the lowered step: as the first program of its first stage takes it.

    Args:
        lowered: the pipeline.
        name: of the input.
        ports: by (worker, value) how programs take it.
        meshes: by stage its devices.
    """
    stage = lowered.map.inputs[name][0]
    worker = lowered.worker_of_stage(stage)
    known = ports.get((worker, str(ValueRef("in", name, stage))))
    whole = NamedSharding(meshes[stage], PartitionSpec())
    return worker, whole if known is None else known[0].sharding(known[1])


def worker_meshes(lowered: LoweredPipeline, devices: Sequence[Any]) -> dict[tuple[int, int], Mesh]:
    """Devices on which a worker runs a stage, by (worker, stage)."""
    table = lowered.table
    return {
        (w, s): stage_mesh(lowered, w, s, devices) for w in range(table.num_workers) for s in table.stages_of_worker(w)
    }


def compiled_stages(
    lowered: LoweredPipeline, meshes: Mapping[tuple[int, int], Mesh], spared: Set[str]
) -> dict[tuple[int, Work], Loaded]:
    """Programs with devices of this process, by worker and work, compiled in one order by each process of a worker.

    Args:
        lowered: the pipeline.
        meshes: see `worker_meshes`.
        spared: values into whose buffers no program may write.
    """
    loaded: dict[tuple[int, Work], Loaded] = {}
    unused = [given_up(lowered.instructions, worker) for worker in range(lowered.table.num_workers)]
    for program in lowered.programs:
        stage = program.work.stage
        for worker in lowered.table.workers_of_stage(stage):
            mesh = meshes[worker, stage]
            if mesh.local_devices:
                names = unused[worker].get(program.work, frozenset()) - spared
                loaded[worker, program.work] = Loaded.compile(program, mesh, names)
    return loaded


def _shardings(
    content: PlanContent,
    meshes: Sequence[Mesh],
    leaves: Mapping[int, StackedLeaf],
    results: Mapping[int, StackedLeaf],
) -> StepShardings:
    """Shardings of inputs and outputs of a step: on the mesh of a stage; of leaves that were split, on several."""
    hosted = hosted_of(content)
    return StepShardings(
        tuple(
            leaves[n].sharding if n in leaves else sharding_of(r, meshes[r.stage], host=n in hosted.inputs)
            for n, r in enumerate(content.inputs)
        ),
        tuple(
            results[n].sharding if n in results else sharding_of(r, meshes[r.stage], host=n in hosted.outputs)
            for n, r in enumerate(content.outputs)
        ),
    )


def _result_places(runtime: LocalPipeline) -> dict[int, NamedSharding]:
    """Place of each output of the step."""
    places: dict[int, NamedSharding] = {}
    for (_, _), loaded in sorted(runtime.loaded.items(), key=lambda e: e[0]):
        for port in loaded.program.writes:
            if port.ref.kind == "out":
                places.setdefault(port.ref.number, port.sharding(loaded.mesh))
    return places


def stage_mesh(lowered: LoweredPipeline, worker: int, stage: int, devices: Sequence[Any]) -> Mesh:
    """The mesh on which a worker runs a stage."""
    mesh: Mesh = device_mesh(lowered.mesh_axes(stage), [devices[i] for i in lowered.devices(worker, stage)])
    return mesh
