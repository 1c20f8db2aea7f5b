"""Arrays that go from devices to devices by a program that both sides start: a permute over the devices of both.

`MoveProgram` moves arrays between any two shardings, also of devices of other processes; each process that has devices
of either side starts it. `PermuteLinks` are the connections between workers that use such programs. The order in which
processes start them is that of `autopar.schedule.order`.

`block_rounds` says which block goes where. Both layouts cut the array evenly. Blocks are the largest pieces of which
every shard of both is made. In a round each device sends one block at most and receives one at most, as in a permute
of XLA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.dtypes import dtype_name, jax_dtype, key_impl
from autopar._compat.meshes import device_mesh
from autopar.runtime.transport.base import WorkerLink
from autopar.runtime.transport.tiles import moved

#: First index of a device's shard in each dim.
Corner = tuple[int, ...]
_DEVICES = "devices"


@dataclass(frozen=True)
class BlockMove:
    """One block of an array that one device sends to another.

    Args:
        source: number of the sender.
        target: number of the receiver.
        source_at: first index of the block in the sender's shard, in each dim.
        target_at: first index of the block in the receiver's shard, in each dim.
    """

    source: int
    target: int
    source_at: Corner
    target_at: Corner


@dataclass(frozen=True)
class BlockRounds:
    """Moves by which an array changes from one sharding to another: it is cut into blocks of one shape.

    Args:
        block: shape of every block.
        rounds: moves that run at the same time; no two of a round share a sender or a receiver.
    """

    block: tuple[int, ...]
    rounds: tuple[tuple[BlockMove, ...], ...]


def block_rounds(
    source_shape: Sequence[int],
    sources: Mapping[int, Corner],
    target_shape: Sequence[int],
    targets: Mapping[int, Corner],
    processes: Sequence[int],
) -> BlockRounds:
    """The moves that put every device's shard together.

    A device takes a block from itself if it has it, else from its process, else from the device that gave the least so
    far.

    Args:
        source_shape: shape of a sender's shard.
        sources: by number of a sender where its shard begins.
        target_shape: shape of a receiver's shard.
        targets: by number of a receiver where its shard begins.
        processes: by number of a device its process.
    """
    block = tuple(math.gcd(a, b) for a, b in zip(source_shape, target_shape, strict=True))
    if 0 in block:
        return BlockRounds(block, ())
    owners: dict[Corner, list[int]] = {}
    for device, corner in sources.items():
        for inside in _corners(source_shape, block):
            owners.setdefault(_sum(corner, inside), []).append(device)
    gave = dict.fromkeys(sources, 0)
    moves: list[BlockMove] = []
    for device, corner in targets.items():
        for inside in _corners(target_shape, block):
            at = _sum(corner, inside)

            def rank(owner: int, device: int = device) -> tuple[bool, bool, int, int]:
                return owner != device, processes[owner] != processes[device], gave[owner], owner

            owner = min(owners[at], key=rank)
            gave[owner] += 1
            moves.append(BlockMove(owner, device, _difference(at, sources[owner]), inside))
    return BlockRounds(block, _dealt(moves))


def _dealt(moves: Sequence[BlockMove]) -> tuple[tuple[BlockMove, ...], ...]:
    """Each move in the first round in which its sender and its receiver have none."""
    rounds: list[list[BlockMove]] = []
    sends: list[set[int]] = []
    receives: list[set[int]] = []
    for move in moves:
        for n in range(len(rounds) + 1):
            if n == len(rounds):
                rounds.append([])
                sends.append(set())
                receives.append(set())
            if move.source not in sends[n] and move.target not in receives[n]:
                rounds[n].append(move)
                sends[n].add(move.source)
                receives[n].add(move.target)
                break
    return tuple(map(tuple, rounds))


def _corners(shape: Sequence[int], block: Sequence[int]) -> list[Corner]:
    return list(itertools.product(*(range(0, n, b) for n, b in zip(shape, block, strict=True))))


def _sum(a: Corner, b: Corner) -> Corner:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _difference(a: Corner, b: Corner) -> Corner:
    return tuple(x - y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class ArrayMove:
    """An array that is to lie on other devices.

    Args:
        shape: of the array, of typed keys without that of their data.
        dtype: its short name, as `autopar._compat.dtypes.jax_dtype` takes it.
        source: how it lies.
        target: how it is to lie.
    """

    shape: tuple[int, ...]
    dtype: str
    source: NamedSharding
    target: NamedSharding

    @property
    def is_key(self) -> bool:
        """Whether these are typed keys of a random number generator."""
        return self.dtype.startswith("key<")

    @cached_property
    def numbers(self) -> ArrayMove:
        """The same move of the numbers that the array is made of, between devices' own memories."""
        shape, dtype, more = self.shape, self.dtype, 0
        if self.is_key:
            keys = jax.ShapeDtypeStruct(self.shape, jax_dtype(self.dtype))
            data = jax.eval_shape(jax.random.key_data, keys)
            shape, dtype, more = data.shape, dtype_name(data.dtype), data.ndim - len(self.shape)
        source, target = (_on_devices(s, len(self.shape), more) for s in (self.source, self.target))
        return ArrayMove(shape, dtype, source, target)


def _on_devices(sharding: NamedSharding, rank: int, more: int) -> NamedSharding:
    """A sharding without the kind of memory, for arrays with ``more`` dims after its own."""
    spec = tuple(sharding.spec)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec, *(None,) * (rank - len(spec) + more)))


@dataclass(frozen=True, eq=False)
class MoveProgram:
    """Several arrays on their way from one set of devices to another, at once.

    Args:
        moves: the arrays.
    """

    moves: tuple[ArrayMove, ...]

    @cached_property
    def mesh(self) -> Mesh:
        """All devices that have a part in it."""
        devices = dict.fromkeys(d for m in self.moves for s in (m.source, m.target) for d in s.mesh.devices.flat)
        mesh: Mesh = device_mesh([(_DEVICES, len(devices))], list(devices))
        return mesh

    @property
    def is_here(self) -> bool:
        """Whether this process has devices of it."""
        return bool(self.mesh.local_devices)

    @cached_property
    def _place(self) -> Mapping[Any, int]:
        return {d: n for n, d in enumerate(self.mesh.devices.flat)}

    @cached_property
    def _numbers(self) -> tuple[ArrayMove, ...]:
        return tuple(m.numbers for m in self.moves)

    @cached_property
    def _given(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Operands of the program: the shards of all devices of each array along the first dim."""
        return tuple(self._stacked(m.source.shard_shape(m.shape), jax_dtype(m.dtype)) for m in self._numbers)

    def _stacked(self, shard: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        first, *rest = shard or (1,)
        sharding = NamedSharding(self.mesh, PartitionSpec(_DEVICES))
        return jax.ShapeDtypeStruct((first * self.mesh.size, *rest), dtype, sharding=sharding)

    @cached_property
    def executable(self) -> Any:
        """jax's compiled object: what devices have -> what they get. Every process of the mesh compiles it itself."""
        bodies = [self._body(m) for m in self._numbers]

        def on_device(*shards: Any) -> tuple[Any, ...]:
            return tuple(body(x) for body, x in zip(bodies, shards, strict=True))

        spec = (PartitionSpec(_DEVICES),) * len(bodies)
        mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped).lower(*self._given).compile()

    def _body(self, move: ArrayMove) -> Callable[[Any], Any]:
        """A device's part of the program, on its shard of an array."""
        have, want = move.source.shard_shape(move.shape), move.target.shard_shape(move.shape)
        sources, targets = self._corners(move.source, move.shape), self._corners(move.target, move.shape)
        processes = [d.process_index for d in self.mesh.devices.flat]
        rounds = block_rounds(have, sources, want, targets, processes)
        is_whole = len(rounds.rounds) == 1 and rounds.block == want

        def body(shard: Any) -> Any:
            x = shard.reshape(have)
            out = jnp.zeros(want, shard.dtype)
            for moves in rounds.rounds:
                came = _arrived(x, rounds.block, moves, self.mesh.size)
                out = came if is_whole else _with_blocks(out, came, moves, self.mesh.size)
            return out if out.ndim else out.reshape(1)

        return body

    def _corners(self, sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """First index of a device's shard in each dim, by number of the device."""
        corners = {}
        for device, index in sharding.devices_indices_map(shape).items():
            slices = (*(index or ()), *(slice(None),) * (len(shape) - len(index or ())))
            corners[self._place[device]] = tuple(s.indices(n)[0] for s, n in zip(slices, shape, strict=True))
        return dict(sorted(corners.items()))

    def __call__(self, arrays: Sequence[Any] | None) -> list[Any] | None:
        """Starts the program; every process of the mesh does.

        Args:
            arrays: as the moves have them; None where this process has no devices of the senders.

        Returns them where they are wanted; None where this process has none of those devices.
        """
        results, outputs = self.start(arrays)
        wait_on_cpus(results, self.mesh)
        return outputs

    def start(self, arrays: Sequence[Any] | None) -> tuple[Sequence[Any], list[Any] | None]:
        """As a call, without waiting; returns also what the program itself makes."""
        results = self.executable(*(self._input(n, arrays) for n in range(len(self.moves))))
        if not any(m.target.addressable_devices for m in self.moves):
            return results, None
        return results, [self._output(n, r) for n, r in enumerate(results)]

    def _input(self, number: int, arrays: Sequence[Any] | None) -> Any:
        move, given = self._numbers[number], self._given[number]
        shards: dict[Any, Any] = {}
        if arrays is not None:
            wanted = self.moves[number].source
            on_devices = NamedSharding(wanted.mesh, wanted.spec)
            array = arrays[number] if arrays[number].sharding == on_devices else moved(arrays[number], on_devices)
            shards = {s.device: s.data for s in array.addressable_shards}
            if self.moves[number].is_key:
                shards = {d: jax.random.key_data(x) for d, x in shards.items()}
            if not move.shape:
                shards = {d: x.reshape(1) for d, x in shards.items()}
        local = [shards[d] if d in shards else self._nothing(number, d) for d in self.mesh.local_devices]
        return jax.make_array_from_single_device_arrays(given.shape, given.sharding, local)

    @cached_property
    def _nothings(self) -> dict[tuple[int, Any], Any]:
        return {}

    def _nothing(self, number: int, device: Any) -> Any:
        """The array that a device gives which sends nothing; the same each time."""
        given = self._given[number]
        shape = given.sharding.shard_shape(given.shape)
        if (number, device) not in self._nothings:
            self._nothings[number, device] = jax.device_put(np.zeros(shape, given.dtype), device)
        return self._nothings[number, device]

    def _output(self, number: int, result: Any) -> Any:
        move, numbers = self.moves[number], self._numbers[number]
        shards = {s.device: s.data for s in result.addressable_shards}
        local = [shards[d] for d in numbers.target.mesh.local_devices]
        if not numbers.shape:
            local = [x.reshape(()) for x in local]
        dtype = jax_dtype(numbers.dtype)
        array = jax.make_array_from_single_device_arrays(numbers.shape, numbers.target, local, dtype=dtype)
        if move.is_key:
            array = jax.random.wrap_key_data(array, impl=key_impl(move.dtype))
        return array if array.sharding == move.target else jax.device_put(array, move.target)


class InFlight:
    """When a process starts programs of several processes: on CPUs one after the end of the other, else at once.

    XLA's CPU devices share a pool of threads. Each of two such programs may hold a part of the pool in every process,
    and wait for its other part in another process. So may a program of several devices of this process, which therefore
    has to end before; a program of one device holds nothing that others wait for.

    Args:
        mesh: devices of all processes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._is_cpu = mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"
        self._several = self._is_cpu and len(mesh.local_devices) > 1
        #: What has to be there before the next program of several processes starts.
        self._results: list[Any] = []

    def note(self, outputs: Sequence[Any]) -> None:
        """Programs of this process alone were started, which make ``outputs``."""
        if self._several:
            self._results.extend(outputs)

    def begin(self) -> None:
        """A program of several processes is to start."""
        wait_on_cpus(self._results, self._mesh)
        self._results.clear()

    def started(self, results: Sequence[Any]) -> None:
        """A program of several processes was started, which makes ``results``."""
        if self._several:
            wait_on_cpus(results, self._mesh)
        elif self._is_cpu:
            self._results.extend(results)

    def end(self) -> None:
        """Waits for all that has to end before a program of several processes."""
        self.begin()


def wait_on_cpus(arrays: Sequence[Any], mesh: Mesh) -> None:
    """Waits for what programs make whose devices are CPUs.

    Args:
        arrays: that the programs make; those that were given up since are not waited for.
        mesh: their devices.
    """
    if mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready([a for a in arrays if not a.is_deleted()])


def _arrived(x: Any, block: tuple[int, ...], moves: Sequence[BlockMove], devices: int) -> Any:
    """The block that a device gets in a round; zeros where it gets none."""
    piece = x
    if block != x.shape:
        table = np.zeros((devices, len(block)), np.int32)
        for m in moves:
            table[m.source] = m.source_at
        piece = lax.dynamic_slice(x, _here(table), block)
    return lax.ppermute(piece, _DEVICES, [(m.source, m.target) for m in moves])


def _with_blocks(out: Any, came: Any, moves: Sequence[BlockMove], devices: int) -> Any:
    """A device's shard with the block that came, where one did."""
    table, gets = np.zeros((devices, came.ndim), np.int32), np.zeros(devices, np.bool_)
    for m in moves:
        table[m.target], gets[m.target] = m.target_at, True
    at = _here(table)
    before = lax.dynamic_slice(out, at, came.shape)
    new = jnp.where(jnp.asarray(gets)[lax.axis_index(_DEVICES)], came, before)
    return lax.dynamic_update_slice(out, new, at)


def _here(table: Any) -> list[Any]:
    """A device's row of a table, as indices."""
    row = jnp.asarray(table)[lax.axis_index(_DEVICES)]
    return [row[k] for k in range(table.shape[1])]


class MovePrograms:
    """Compiled programs by what they move: microbatches share them."""

    def __init__(self) -> None:
        self._programs: dict[tuple[ArrayMove, ...], MoveProgram] = {}
        self._compiled = 0

    def program(self, moves: Sequence[ArrayMove]) -> MoveProgram:
        """The program of some moves."""
        key = tuple(moves)
        if key not in self._programs:
            self._programs[key] = MoveProgram(key)
        return self._programs[key]

    def compile(self) -> list[MoveProgram]:
        """Compiles those that this process has devices of, in the order in which they were asked for.

        Returns:
            Programs that were asked for since the last call, those of other processes too.
        """
        new = list(self._programs.values())[self._compiled :]
        self._compiled = len(self._programs)
        for program in new:
            if program.is_here:
                _ = program.executable
        return new


@dataclass(frozen=True, eq=False)
class Exchange:
    """Values that one worker sends to another at once.

    Args:
        tags: of the values, in order.
        program: that moves them; None where both workers are this process's alone, so that they change hands.
        sends: whether this process has devices of the sender.
        receives: likewise of the receiver.
    """

    tags: tuple[int, ...]
    program: MoveProgram | None
    sends: bool
    receives: bool


class PermuteLinks:
    """The connections of this process's workers in one step.

    The process sends and receives in the order of `autopar.schedule.order`: all values of an exchange after each
    other, those of the sender first.

    Args:
        exchanges: by tag.
        in_flight: of this process.
    """

    def __init__(self, exchanges: Mapping[int, Exchange], in_flight: InFlight) -> None:
        self._exchanges = exchanges
        self._in_flight = in_flight
        self._given: dict[int, Any] = {}
        self._came: dict[int, Any] = {}

    def link(self, worker: int) -> WorkerLink:
        """The connections of one worker."""
        return _PermuteLink(self)

    def send(self, tag: int, array: Any) -> None:
        """Takes a value; with the last one of its exchange the program is started."""
        exchange = self._exchanges[tag]
        self._given[tag] = array
        if tag == exchange.tags[-1]:
            arrays = [self._given.pop(t) for t in exchange.tags]
            self._keep(exchange, arrays if exchange.program is None else self._start(exchange.program, arrays))

    def receive(self, tag: int, sharding: NamedSharding | None) -> Any:
        """A value where it is wanted."""
        exchange = self._exchanges[tag]
        if tag == exchange.tags[0] and not exchange.sends:
            assert exchange.program is not None, "a value comes from another process without a program"
            self._keep(exchange, self._start(exchange.program, None))
        array = self._came.pop(tag)
        return array if sharding is None or array.sharding == sharding else moved(array, sharding)

    def _start(self, program: MoveProgram, arrays: Sequence[Any] | None) -> list[Any] | None:
        self._in_flight.begin()
        results, outputs = program.start(arrays)
        self._in_flight.started(results)
        return outputs

    def _keep(self, exchange: Exchange, arrays: Sequence[Any] | None) -> None:
        if exchange.receives and arrays is not None:
            self._came.update(zip(exchange.tags, arrays, strict=True))


class _PermuteLink(WorkerLink):
    def __init__(self, links: PermuteLinks) -> None:
        self._links = links

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        self._links.send(tag, array)

    def has_room(self, to: int) -> bool:
        return True

    def ready(self, source: int) -> bool:
        return True

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        return self._links.receive(tag, sharding)
