"""A pipeline in processes that run one script: one XLA program on all their devices, state on its stage's devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.dtypes import jax_dtype
from autopar._compat.meshes import partition_spec
from autopar.errors import AutoparError
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.one_program import OneProgram, unpacked
from autopar.lower.pipeline.rounds import BufferCopy, Key, ShardedType, whole_key
from autopar.runtime.hosts.arrays import is_global, own, spread, whole
from autopar.runtime.launches import LAUNCHES
from autopar.runtime.leaves import check_data, give_up
from autopar.runtime.loaded import LoadedStep, StepShardings
from autopar.schedule import Buffer, Work
from autopar.schedule.memory import WorkerMemory


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
    """A compiled pipeline of several processes; see `autopar.runtime.loaded.LoadedProgram`.

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

    @property
    def worker_memory(self) -> tuple[WorkerMemory, ...]:
        """Memory of single workers, which one program does not have."""
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
        """Runs a step.

        Args:
            placed: inputs as `match` or `place_all` made them.
            leaves: what they were made from; donated ones are deleted.
        """
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
        """An output from its pieces, which lie behind each other along the first dim."""
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
