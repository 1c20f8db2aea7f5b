"""Workers whose processes form one world of `jax.distributed`: what one sends another is a program that both start.

`WorldLink` is a process's part of its worker's connections. Values of the instruction lists have exchanges that the
driver planned (`autopar.runtime.ray.exchanges`). For other arrays sender and receiver tell each other both layouts over
sockets, then both start the program. A worker cannot give a step up: its program waits until the other process ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar._compat.dtypes import dtype_name
from autopar._compat.meshes import device_mesh
from autopar.lower.hosted import PINNED_HOST
from autopar.lower.pipeline.exported import Axes, PlacedPort
from autopar.runtime.interpreter import After, Before
from autopar.runtime.transport.base import WorkerLink
from autopar.runtime.transport.permutes import ArrayMove, Exchange, InFlight, MovePrograms, PermuteLinks
from autopar.runtime.transport.process_groups import GroupLink
from autopar.runtime.transport.tiles import is_key
from autopar.schedule import Instruction, Recv, Send


class ArrayFacts(msgspec.Struct, frozen=True, array_like=True):
    """Layout of an array, as sender and receiver tell each other.

    Args:
        shape: of the array, of typed keys without that of their data.
        dtype: its short name.
        axes: of the mesh on which it lies, or is to lie; empty where it is on the host.
        place: how.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    place: PlacedPort


def axes_of(sharding: NamedSharding) -> Axes:
    """The mesh axes of a sharding, major first."""
    return tuple((str(a), int(n)) for a, n in sharding.mesh.shape.items())


def placed_as(sharding: NamedSharding, rank: int) -> PlacedPort:
    """A sharding of an array of ``rank`` dims as plain data."""
    entries = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    dims = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    return PlacedPort("", dims, sharding.memory_kind == PINNED_HOST)


class WorldLink(WorkerLink):
    """One process's part of its worker's connections.

    Args:
        sockets: connections by which workers tell each other of arrays that no list names.
        worker: number of this process's.
        devices: number of a worker -> its devices, in the order of the cluster.
        exchanges: by tag what the worker sends and receives by its list.
        programs: compiled ones.
    """

    def __init__(
        self,
        sockets: GroupLink,
        worker: int,
        devices: Callable[[int], Sequence[Any]],
        exchanges: Mapping[int, Exchange],
        programs: MovePrograms,
    ) -> None:
        self._sockets = sockets
        self._worker = worker
        self._devices = devices
        self._exchanges = exchanges
        self._programs = programs
        mesh_devices = devices(worker)
        self._mesh = device_mesh((("devices", len(mesh_devices)),), mesh_devices)
        self._processes = len({d.process_index for d in mesh_devices})
        everything = jax.devices()
        self._everything = device_mesh((("devices", len(everything)),), everything)
        self._in_flight = InFlight(self._everything)
        self._links = PermuteLinks(exchanges, self._in_flight)

    def begin(self, instructions: Sequence[Instruction], before: Before, after: After | None) -> tuple[Before, After]:
        """Begins a step; what is to be called before and after its instructions. `end` has to follow.

        Args:
            instructions: of the step.
            before, after: what others want to be called; see `Worker.run`.
        """
        in_flight = self._in_flight = InFlight(self._everything)
        self._links = PermuteLinks(self._exchanges, in_flight)
        spans = self._processes > 1

        def is_together(index: int) -> bool:
            return spans and not isinstance(instructions[index], Send | Recv)

        def first(index: int) -> None:
            before(index)
            if is_together(index):
                in_flight.begin()

        def then(index: int, outputs: tuple[Any, ...]) -> None:
            (in_flight.started if is_together(index) else in_flight.note)(outputs)
            if after is not None:
                after(index, outputs)

        return first, then

    def end(self) -> None:
        """Ends a step; see `InFlight.end`."""
        self._in_flight.end()

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        """Sends a copy of an array; returns before it arrived, and keeps the array alive as long as it must."""
        if tag in self._exchanges:
            self._count(array)
            self._links.send(tag, array)
            return
        if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
            self._report(to, tag, ArrayFacts((), "", (), PlacedPort("", ())))
            self._sockets.send(to, tag, array, name)
            return
        shape, dtype, place = tuple(array.shape), dtype_name(array.dtype), array.sharding
        self._report(to, tag, ArrayFacts(shape, dtype, axes_of(place), placed_as(place, len(shape))))
        wanted = self._reported(to, tag)
        self._count(array)
        self._programs.program([self._move(wanted, place, self._place(to, wanted))])([array])

    def receive(self, source: int, tag: int, sharding: NamedSharding | None) -> Any:
        """The next array that ``source`` sent. Without a sharding each device of this worker gets the whole array."""
        if tag in self._exchanges:
            return self._links.receive(tag, sharding)
        came = self._reported(source, tag)
        if not came.axes:
            return self._sockets.receive(source, tag, sharding)
        wanted = sharding or NamedSharding(self._mesh, PartitionSpec())
        place = placed_as(wanted, len(came.shape))
        self._report(source, tag, ArrayFacts(came.shape, came.dtype, axes_of(wanted), place))
        arrays = self._programs.program([self._move(came, self._place(source, came), wanted)])(None)
        assert arrays is not None, "a process that receives has no devices of its worker"
        return arrays[0]

    def has_room(self, to: int) -> bool:
        """Whether another array may be sent before ``to`` took the last one: always, for senders wait."""
        return True

    def ready(self, source: int) -> bool:
        """Whether `receive` would return, or fail, at once: always, for a receiver waits for the sender."""
        return True

    def _count(self, array: Any) -> None:
        data = jax.random.key_data(array) if is_key(array) else array
        self.moved_bytes += data.nbytes // self._processes

    def _place(self, worker: int, facts: ArrayFacts) -> NamedSharding:
        count = math.prod(n for _, n in facts.axes)
        return facts.place.sharding(device_mesh(facts.axes, self._devices(worker)[:count]))

    @staticmethod
    def _move(facts: ArrayFacts, source: NamedSharding, target: NamedSharding) -> ArrayMove:
        return ArrayMove(facts.shape, facts.dtype, source, target)

    def _report(self, to: int, tag: int, facts: ArrayFacts) -> None:
        self._sockets.send(to, tag, np.frombuffer(msgspec.msgpack.encode(facts), np.uint8))

    def _reported(self, source: int, tag: int) -> ArrayFacts:
        text = np.asarray(self._sockets.receive(source, tag, None))
        return msgspec.msgpack.decode(text.tobytes(), type=ArrayFacts)
