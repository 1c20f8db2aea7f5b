"""Instruction lists as one XLA program on all devices: branches by worker in each round, permutes between rounds.

Every device keeps the values of its own worker alone, in slots; see `autopar.lower.pipeline.rounds`. Layouts are over
the axes of the grid (`autopar.lower.pipeline.grid`); the programs of stages call them by those of their own meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import bytes_of, from_bytes, jax_dtype, key_impl
from autopar.ir import Layout, TensorType
from autopar.lower.localize.base import DeviceAxes
from autopar.lower.pipeline.grid import WORKERS, Axes, Grid
from autopar.lower.pipeline.rounds import Key, Permute, Round, Rounds, ShardedType, WorkerRound, whole_key
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.lower.reshard import apply_steps
from autopar.schedule import Accumulate, Apply, Buffer, Free, Recv, Run, Work
from autopar.sharding.reshard import PathTables

_JOINS = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


@dataclass(frozen=True, eq=False)
class OneProgram:
    """A step of a pipeline on one device, where all stages are one XLA program.

    Args:
        rounds: what each worker runs and sends, round by round.
        programs: the stages' programs by work.
        tables: by worker the cheapest resharding paths between layouts over its axes.
        grid: the devices of all workers.
        meshes: axes of the mesh of each stage.
        results: values that are results.
        shared: (worker, value) of results that all workers get.
        gathers: whether permutes inside a worker are gathers; see `DeviceAxes`.
    """

    rounds: Rounds
    programs: Mapping[Work, StageProgram]
    tables: Sequence[PathTables]
    grid: Grid
    meshes: Sequence[Axes]
    results: frozenset[Key] = frozenset()
    shared: tuple[tuple[int, Key], ...] = ()
    gathers: bool = False

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes of the grid."""
        return dict(self.grid.axes)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """Numbers of the slots (arrays that every device has room for) in which some worker has a value at first."""
        return tuple(sorted({n for t in self.rounds.start for n in t.values()}))

    @cached_property
    def finish(self) -> tuple[int, ...]:
        """Numbers of the slots (arrays that every device has room for) in which some worker has a result at the end."""
        return tuple(sorted({n for t in self.rounds.end for k, n in t.items() if k in self.results}))

    def on_device(self, *slots: Any) -> tuple[Any, ...]:
        """The slots of `finish` when the step ends, from those of `begin`; then what is `shared`."""
        given = dict(zip(self.begin, slots, strict=True))
        state = tuple(
            given[n] if n in given else jnp.zeros(size, jax_dtype(dtype))
            for n, (dtype, size) in enumerate(self.rounds.slots)
        )
        inbox: tuple[Any, ...] = ()
        for number in range(len(self.rounds.rounds)):
            state, inbox = self._round(number, state, inbox)
        return (*(state[n] for n in self.finish), *self._everywhere(state))

    def _everywhere(self, state: tuple[Any, ...]) -> list[Any]:
        """Sends a `shared` value to all workers: as bytes, by permutes of which each waits for the one before."""
        if not self.shared:
            return []
        microbatch_inputs = []
        for worker, key in self.shared:
            sharded, wanted = self.rounds.sharded[worker, key], self.everywhere(worker, key)
            piece, layout = self._unpacked(state[self.rounds.end[worker][key]], sharded)
            microbatch_inputs.append(self._moved(worker, sharded.type, layout, wanted.layout, piece))
        parts = [bytes_of(p) for p in microbatch_inputs]
        owners = np.concatenate([np.full(p.shape, w) for p, (w, _) in zip(parts, self.shared, strict=True)])
        whole, here = jnp.concatenate(parts), self._worker()
        for source in sorted({w for w, _ in self.shared}):
            for target in range(len(self.rounds.start)):
                if target != source:
                    came = self._sent(whole, [(source, target)])
                    whole = jnp.where((here == target) & (owners == source), came, whole)
        ends = np.cumsum([p.shape[0] for p in parts])
        return [
            from_bytes(whole[end - part.shape[0] : end], piece)
            for end, part, piece in zip(ends, parts, microbatch_inputs, strict=True)
        ]

    def everywhere(self, worker: int, key: Key) -> ShardedType:
        """Sharding of a result that is `shared`, on every worker."""
        least = min(range(len(self.grid.workers)), key=lambda w: self.grid.workers[w][1])
        return self.rounds.sharded[worker, key].over(self.grid.axes_of(least))

    def _worker(self) -> Any:
        """Number of the device's worker."""
        if self.grid.names[0] == WORKERS:
            return lax.axis_index(WORKERS)
        of_place = np.zeros(len(self.grid.devices), np.int32)
        for worker, (first, count) in enumerate(self.grid.workers):
            of_place[first : first + count] = worker
        return jnp.asarray(of_place)[lax.axis_index(self.grid.names)]

    def _sent(self, array: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Permutes an array over devices by pairs (sender, receiver), each device at most once on either side."""
        if self.grid.names[0] == WORKERS:
            return lax.ppermute(array, WORKERS, pairs)
        parts = [self.grid.pairs(source, target) for source, target in pairs]
        names, place = self.grid.names, lax.axis_index(self.grid.names)
        received = None
        for number in range(max(map(len, parts))):
            now = [pair for part in parts for some in part[number : number + 1] for pair in some]
            came = lax.ppermute(array, names, now)
            if received is not None:
                here = np.zeros(len(self.grid.devices), np.bool_)
                here[[to for _, to in now]] = True
                came = jnp.where(jnp.asarray(here)[place], came, received)
            received = came
        return received

    def _moved(self, worker: int, type: TensorType, layout: Layout, wanted: Layout, piece: Any) -> Any:
        """A shard of a value on a worker in another layout."""
        if layout == wanted:
            return piece
        tables = self.tables[worker]
        axes = DeviceAxes({a: (a,) for a in tables.mesh.names}, self.gathers)
        return apply_steps(tables.path(type, layout, wanted), piece, tables.mesh, axes)

    def _round(self, number: int, state: tuple[Any, ...], inbox: tuple[Any, ...]) -> tuple[Any, Any]:
        this = self.rounds.rounds[number]
        touched = {n for t in this.worker_rounds for n in (*t.before.values(), *t.after.values())}
        if number == len(self.rounds.rounds) - 1:
            touched |= set(self.finish)  # what is done with results waits for all that was sent
        order = sorted(touched)
        given = tuple(state[n] for n in order)
        branches = [self._branch(w, worker_round, this, order) for w, worker_round in enumerate(this.worker_rounds)]
        slots, out = lax.switch(self._worker(), branches, given, inbox)
        updated = list(state)
        for n, array in zip(order, slots, strict=True):
            updated[n] = array
        arrived = tuple(self._sent(o, e.pairs) for o, e in zip(out, this.exchanges, strict=True))
        return tuple(updated), arrived

    def _branch(
        self, worker: int, worker_round: WorkerRound, this: Round, touched: Sequence[int]
    ) -> Callable[..., Any]:
        at = {slot: n for n, slot in enumerate(touched)}

        def branch(given: tuple[Any, ...], inbox: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            values: dict[Key, tuple[Any, Layout]] = {}
            for key, slot in worker_round.before.items():
                values[key] = self._unpacked(given[at[slot]], self.rounds.sharded[worker, key])
            for message in worker_round.arrivals:
                values[message.key] = self._unpacked(inbox[message.exchange], message.sharded)
            for instruction in worker_round.instructions:
                self._do(worker, values, instruction)
            slots = list(given)
            for key, slot in worker_round.after.items():
                if (
                    worker_round.before.get(key) == slot
                    and key in worker_round.before
                    and not _written(worker_round, key)
                ):
                    continue
                slots[at[slot]] = _packed(values[key][0], self.rounds.slots[slot])
            return tuple(slots), tuple(
                self._outgoing(worker, values, worker_round, n, e) for n, e in enumerate(this.exchanges)
            )

        return branch

    def _outgoing(
        self,
        worker: int,
        values: Mapping[Key, tuple[Any, Layout]],
        worker_round: WorkerRound,
        number: int,
        exchange: Permute,
    ) -> Any:
        """A worker's operand of a permute: zeros where it sends nothing."""
        for message in worker_round.sends:
            if message.exchange == number:
                piece, layout = values[message.key]
                piece = self._moved(worker, message.sharded.type, layout, message.sharded.layout, piece)
                return _packed(piece, (exchange.dtype, exchange.size))
        return jnp.zeros(exchange.size, jax_dtype(exchange.dtype))

    def _unpacked(self, flat: Any, sharded: ShardedType) -> tuple[Any, Layout]:
        return unpacked(flat, sharded, self.sizes), sharded.layout

    def _do(self, worker: int, values: dict[Key, tuple[Any, Layout]], instruction: Any) -> None:
        match instruction:
            case Run(work=work, microbatch=number, reads=reads, writes=writes, donate=donate):
                self._run(worker, values, work, max(number, 0), reads, writes)
                _forget(values, donate)
            case Apply(work=work, reads=reads, writes=writes, donate=donate):
                self._run(worker, values, work, 0, reads, writes)
                _forget(values, donate)
            case Accumulate(into=into, value=value, reduce=reduce, first=first, donate=donate):
                term = values[whole_key(value)]
                if reduce == "concatenate":
                    values[into, value.microbatch, -1] = term
                elif first:
                    values[whole_key(into)] = term
                else:
                    total, layout = values[whole_key(into)]
                    values[whole_key(into)] = _JOINS[reduce](total, term[0]), layout
                if donate and value != into:
                    _forget(values, (value,))
            case Free(values=buffers):
                _forget(values, buffers)
            case Recv(value=value, tag=tag):
                key = next(k for k in values if k[2] == tag)
                values[whole_key(value)] = values.pop(key)
            case _:
                pass  # what is sent is taken from the values when the round ends

    def _run(
        self,
        worker: int,
        values: dict[Key, tuple[Any, Layout]],
        work: Work,
        number: int,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> None:
        program = self.programs.get(work)
        if program is None or not program.results:
            return
        by_name = {b.value: b for b in reads}
        mesh = self.meshes[work.stage]
        microbatch_inputs = []
        for port in program.reads:
            piece, layout = _read(values, by_name[port.name])
            microbatch_inputs.append(self._moved(worker, port.type, layout, self.grid.layout(mesh, port.layout), piece))
        outputs = program.on_device(
            jnp.int32(number), microbatch_inputs, DeviceAxes(self.grid.parts[mesh], self.gathers)
        )
        for buffer, port, piece in zip(writes, program.results, outputs, strict=True):
            array = jnp.asarray(piece) if isinstance(piece, np.ndarray | np.generic) else piece
            values[whole_key(buffer)] = array, self.grid.layout(mesh, port.layout)


def unpacked(flat: Any, sharded: ShardedType, sizes: Mapping[str, int]) -> Any:
    """A device's shard of a value from the slot that it lies in.

    Args:
        flat: what the slot holds.
        sharded: how the value lies.
        sizes: of the axes of the grid.
    """
    shape, piece = sharded.shape(sizes), flat[: sharded.size(sizes)]
    if not sharded.is_key:
        return piece.reshape(shape)
    return jax.random.wrap_key_data(piece.reshape(*shape, sharded.words), impl=key_impl(sharded.type.dtype))


def _written(worker_round: WorkerRound, key: Key) -> bool:
    """Whether an instruction of the turn makes or changes a value."""
    for i in worker_round.instructions:
        if isinstance(i, Run | Apply) and key[0] in i.writes:
            return True
        if isinstance(i, Accumulate) and key[0] == i.into:
            return True
        if isinstance(i, Recv) and key[0] == i.value:
            return True
    return False


def _read(values: Mapping[Key, tuple[Any, Layout]], buffer: Buffer) -> tuple[Any, Layout]:
    value = values.get(whole_key(buffer))
    if value is not None:
        return value
    rows = sorted((k[1], v) for k, v in values.items() if k[0] == buffer and k[1] >= 0)
    layout = rows[0][1][1]
    return jnp.stack([piece for _, (piece, _) in rows]), layout.stack()


def _forget(values: dict[Key, tuple[Any, Layout]], buffers: Sequence[Buffer]) -> None:
    gone = set(buffers)
    for key in [k for k in values if k[0] in gone and k[2] < 0]:
        del values[key]


def _packed(array: Any, slot: tuple[str, int]) -> Any:
    numbers = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    flat = numbers.reshape(-1).astype(jax_dtype(slot[0]))
    missing = slot[1] - flat.shape[0]
    return flat if not missing else jnp.concatenate([flat, jnp.zeros(missing, flat.dtype)])
