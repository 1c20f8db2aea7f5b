"""`RemotePipeline`: the driver of workers in other processes: load once, then one call a worker and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._compat.dtypes import jax_dtype
from autopar.errors import AutoparError, ClusterError, WorkerLostError
from autopar.lower.pipeline.exported import ExportedProgram, export_maker
from autopar.runtime.ray.deployment import Deployment, Replanner
from autopar.runtime.ray.messages import (
    FileResult,
    Move,
    ReadRequest,
    Snapshot,
    Start,
    Step,
    StepResult,
    Timed,
    decode,
    encode,
)
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.snapshot import SnapshotOnWorkers
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.times import measured_timeline
from autopar.runtime.ray.values import ArrayOwner, RemoteArray, Writing
from autopar.runtime.ray.worker_group import WorkerGroup
from autopar.runtime.shards import DamageError, Leaf
from autopar.runtime.transport.process_groups import ProcessGroups
from autopar.runtime.transport.tiles import HostKeys, host_copy, joined, on_host
from autopar.simulate import Timeline


@dataclass(frozen=True)
class Call:
    """A step that was asked for.

    Args:
        number: of the step.
        inputs: number of the array of each input.
        given: arrays among them that the driver sends along.
        results: number of the array of each output.
    """

    number: int
    inputs: tuple[int, ...]
    given: Mapping[int, Any]
    results: tuple[int, ...]


@dataclass
class _State:
    """What changes while a pipeline runs."""

    next_id: int = 0
    steps: int = 0
    live: set[int] = field(default_factory=set)
    dropped: list[int] = field(default_factory=list)
    #: On which workers an array lies, and as which value.
    holders: dict[int, dict[int, str]] = field(default_factory=dict)
    #: What lies on workers, in the driver's memory.
    copies: dict[int, Any] = field(default_factory=dict)
    log: list[Call] = field(default_factory=list)
    times: tuple[tuple[Timed, ...], ...] = ()
    recoveries: int = 0


class RemotePipeline(ArrayOwner):
    """A pipeline on workers.

    Args:
        deployment: what runs, and where.
        options: see `RunOptions`.
        progress: told what is being done.
        spare: what to do when machines are lost for good; without it that is an error.
    """

    def __init__(
        self,
        deployment: Deployment,
        options: RunOptions,
        progress: Callable[[str], None] | None = None,
        spare: Replanner | None = None,
    ) -> None:
        self.deployment = deployment
        self.options = options
        self._progress = progress or (lambda text: None)
        self._spare = spare
        self._session: Session | None = None
        self._exported: tuple[ExportedProgram, ...] = ()
        self._state = _State()
        self._x64 = bool(jax.config.read("jax_enable_x64"))

    @property
    def source(self) -> Pipelined:
        """The lowered pipeline."""
        return self.deployment.source

    @property
    def groups(self) -> ProcessGroups:
        """The processes of its workers."""
        return self.deployment.groups

    # -- life ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Starts workers, which compile their programs and connect to each other; returns when all are ready."""
        source = self.source
        if not self._exported:
            self._progress(f"exporting {len(source.programs)} programs")
            self._exported = source.exported(self.options.platform)
        several = (
            "" if self.groups.num_processes == source.num_workers else f" of {self.groups.num_processes} processes"
        )
        self._progress(f"starting {source.num_workers} workers{several}")
        self._session = Session(source, self.groups, self.deployment.start, self.options, self._x64)
        self._progress("compiling")
        try:
            self._session.load(self._exported)
        except BaseException:
            self.close()
            raise
        self._progress("ready")

    def close(self) -> None:
        """Ends the workers; arrays on them are gone."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._state.holders.clear()

    @property
    def session(self) -> Session:
        """The workers' processes. AutoparError where none are loaded."""
        if self._session is None:
            raise AutoparError("the pipeline has no workers", cause="it was closed, or never loaded", remedy="load it")
        return self._session

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers' processes. AutoparError where none are loaded."""
        return self.session.worker_group

    @property
    def recoveries(self) -> int:
        """How often lost workers were replaced."""
        return self._state.recoveries

    @property
    def times(self) -> tuple[tuple[Timed, ...], ...]:
        """For each worker when its instructions ran, of the last step that was timed."""
        return self._state.times

    def compiled(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program of each worker."""
        answers = self._all("compiled", [()] * self.source.num_workers, self.options.load_s)
        return {f"{name} on worker {w}": text for w, found in enumerate(answers) for name, text in found[0].items()}

    def timeline(self) -> Timeline:
        """The last step that was timed. AutoparError where none was."""
        return measured_timeline(self.source, self._state.times)

    # -- arrays --------------------------------------------------------------------------------

    def put(self, values: Mapping[int, Any]) -> dict[int, RemoteArray]:
        """Puts inputs of the step where it reads them.

        Args:
            values: arrays by index of the input; inputs that are cut into microbatches stay with the driver.
        """
        made: dict[int, RemoteArray] = {}
        given: list[dict[int, Any]] = [{} for _ in range(self.source.num_workers)]
        names: list[dict[int, str]] = [{} for _ in range(self.source.num_workers)]
        for index, value in sorted(values.items()):
            held = {w: p.value for w, places in enumerate(self.source.places) for p in places if p.index == index}
            if not held or self.source.inputs[index].name in self.source.batch:
                continue
            id = self._new_id()
            host = to_host(value)
            for w, name in held.items():
                given[w][id], names[w][id] = host, name
            self._state.holders[id] = held
            if self.options.recover:
                self._state.copies[id] = host
            type = self.source.inputs[index].type
            made[index] = self._handle(id, type.shape, value.dtype, _where(held))
        self._all("put", [(a, n) for a, n in zip(given, names, strict=True)], self.options.load_s)
        return made

    def make(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        parts: Mapping[int, Callable[[Sequence[Any]], Any]],
    ) -> dict[int, RemoteArray]:
        """Inputs of the step, made on the workers that read them.

        Args:
            function: arrays -> arrays.
            arguments: what it is called with.
            parts: by index of the input: the results of ``function`` -> the input.

        Returns handles by index, without those that are cut into microbatches or that nobody reads.
        """
        placements = {r.name: r for p in self._exported for r in p.reads}
        axes = {r.name: p.axes for p in self._exported for r in p.reads}
        ids: dict[int, int] = {}
        calls: list[tuple[Any, ...]] = []
        held: dict[int, dict[int, str]] = {}
        host = [to_host(a) for a in arguments]
        for worker, places in enumerate(self.source.places):
            own = [p for p in places if p.index in parts and not p.microbatches and p.value in placements]
            code = b""
            if own:
                code = export_maker(
                    lambda *a, own=own: [parts[p.index](function(*a)) for p in own],
                    arguments,
                    [placements[p.value] for p in own],
                    axes[own[0].value],
                    self.options.platform,
                )
            for p in own:
                ids.setdefault(p.index, self._new_id())
                held.setdefault(ids[p.index], {})[worker] = p.value
            calls.append((code, host, [ids[p.index] for p in own], [p.value for p in own]))
        self._all("make", calls, self.options.load_s)
        self._state.holders.update(held)
        made = {}
        for index, id in ids.items():
            type = self.source.inputs[index].type
            made[index] = self._handle(id, type.shape, jax_dtype(type.dtype), _where(held[id]))
        if self.options.recover:
            self._state.copies.update(self._fetch(ids.values()))
        return made

    def kept(self) -> list[int]:
        """Number of arrays that each worker keeps."""
        return [found[0] for found in self._all("forget", [((),)] * self.source.num_workers, self.options.deadline_s)]

    def fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        """Copies of arrays on the host, by number. WorkerLostError where they are lost."""
        found: dict[int, Any] = self._again(lambda: self._fetch(ids))
        return found

    def _fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        wanted: list[list[int]] = [[] for _ in range(self.source.num_workers)]
        found: dict[int, Any] = {}
        for id in ids:
            held = self._state.holders.get(id)
            if not held and id in self._state.copies:
                found[id] = self._state.copies[id]
                continue
            if not held:
                raise AutoparError("an array was lost with the workers that had it", remedy="use recover=True")
            wanted[min(held)].append(id)
        if not any(wanted):
            return found
        for own, parts in zip(wanted, self._all("get", [(w,) for w in wanted], self.options.deadline_s), strict=True):
            found.update({id: on_host(joined([p[id] for p in parts])) for id in own})
        return found

    def has(self, id: int) -> bool:
        """See `ArrayOwner.has`."""
        return self._session is not None and bool(self._state.holders.get(id))

    def hold(self, names: Mapping[int, str]) -> Writing:
        """See `ArrayOwner.hold`. WorkerLostError where workers are lost."""
        writing: Writing = self._again(lambda: self._hold(names))
        return writing

    def _hold(self, names: Mapping[int, str]) -> Writing:
        own: list[dict[int, str]] = [{} for _ in range(self.source.num_workers)]
        copies: dict[str, Any] = {}
        for id, name in sorted(names.items()):
            held = self._state.holders.get(id)
            if held:
                # The one that has least to write.
                own[min(held, key=lambda w: (len(own[w]), w))][id] = name
            else:
                copies[name] = self._fetch([id])[id]
        ticket = self._new_id()
        self._all("hold", [(encode(Snapshot(ticket, n)),) for n in own], self.options.deadline_s)
        return SnapshotOnWorkers(self.session, ticket, copies, self.options.load_s)

    def read(self, folder: Path, leaves: Mapping[int, Leaf]) -> dict[int, RemoteArray]:
        """See `ArrayOwner.read`. WorkerLostError where workers are lost."""
        made: dict[int, RemoteArray] = self._again(lambda: self._read(folder, leaves))
        return made

    def _read(self, folder: Path, leaves: Mapping[int, Leaf]) -> dict[int, RemoteArray]:
        own: list[ReadRequest] = [ReadRequest(str(folder.absolute()), {}, {}) for _ in range(self.source.num_workers)]
        ids: dict[int, int] = {}
        for like, leaf in sorted(leaves.items()):
            ids[like] = self._new_id()
            for worker, value in self._state.holders[like].items():
                own[worker].leaves[ids[like]] = leaf
                own[worker].values[ids[like]] = value
        for answers in self._all("read", [(encode(w),) for w in own], self.options.load_s):
            for told in (decode(a, FileResult) for a in answers):
                if told.error:
                    raise DamageError(told.file, told.error)
        self._state.holders.update({id: dict(self._state.holders[like]) for like, id in ids.items()})
        if self.options.recover:
            self._state.copies.update(self._fetch(ids.values()))
        made = {}
        for like, id in ids.items():
            leaf = leaves[like]
            shape = leaf.shape[:-1] if leaf.key else leaf.shape
            dtype = jax.random.key(0, impl=leaf.key).dtype if leaf.key else jnp.dtype(leaf.dtype)
            made[like] = self._handle(id, shape, dtype, _where(self._state.holders[id]))
        return made

    # -- steps ---------------------------------------------------------------------------------

    def step(self, values: Sequence[Any], *, timed: bool = False) -> list[RemoteArray]:
        """Runs a step.

        Args:
            values: the inputs: handles of this pipeline, or arrays.
            timed: whether instructions are timed, for which workers wait for each program.

        Returns a handle for each output.

        Raises:
            WorkerLostError: a worker was lost, and ``recover`` is off or did not help.
        """
        state = self._state
        if self.options.recover and len(state.log) >= self.options.copy_every:
            self._copy()
        given: dict[int, Any] = {}
        inputs = []
        for value in values:
            if isinstance(value, RemoteArray) and (value.id in state.holders or value.id in state.copies):
                inputs.append(value.id)
            else:
                id = self._new_id()
                given[id] = value.host if isinstance(value, RemoteArray) else to_host(value)
                inputs.append(id)
        results = tuple(self._new_id() for _ in self.source.results)
        call = Call(state.steps, tuple(inputs), given, results)
        state.steps += 1
        forget, state.dropped = tuple(state.dropped), []
        for dropped in forget:
            state.holders.pop(dropped, None)
        small = self._again(lambda: self._run(call, timed, forget))
        if self.options.recover:
            state.log.append(call)
        handles = []
        for id, r in zip(results, self.source.results, strict=True):
            handle = self._handle(id, r.type.shape, r.dtype, r.placement)
            if id in small:
                handle.tell(small[id])
            handles.append(handle)
        return handles

    def _run(self, call: Call, timed: bool, forget: tuple[int, ...] = ()) -> dict[int, Any]:
        state, source = self._state, self.source
        self._put_back(call)
        moves: list[Move] = []
        starts: list[list[Start]] = []
        given: list[dict[int, Any]] = []
        count = source.program.table.num_microbatches
        for worker, places in enumerate(source.places):
            starts.append([])
            given.append({})
            for p in places:
                id = call.inputs[p.index]
                starts[worker].append(Start(p.value, id, p.microbatches, p.dim, count))
                if id in call.given:
                    given[worker][id] = call.given[id]
                elif worker not in state.holders[id]:
                    moves.append(Move(id, min(state.holders[id]), worker, p.value))
                    state.holders[id] = {**state.holders[id], worker: p.value}
        results: list[list[tuple[int, Any]]] = [[] for _ in source.places]
        for id, r in zip(call.results, source.results, strict=True):
            results[r.worker].append((id, r.buffer))
        messages = [
            (
                encode(
                    Step(
                        call.number,
                        tuple(starts[w]),
                        tuple(moves),
                        tuple(results[w]),
                        forget,
                        self.options.deadline_s,
                        timed,
                    )
                ),
                given[w],
            )
            for w in range(source.num_workers)
        ]
        answers = self._all("step", messages, self.options.deadline_s)
        for id, r in zip(call.results, source.results, strict=True):
            state.holders[id] = {r.worker: r.buffer.value}
        if timed:
            state.times = tuple(decode(a[0][0], StepResult).times for a in answers)
        return {id: array for (_, small), *_ in answers for id, array in small.items()}

    # -- workers that are lost -----------------------------------------------------------------

    def _again(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; with ``recover`` it is done again after workers were lost."""
        lost: WorkerLostError | None = None
        for _ in range(self.options.attempts if self.options.recover else 1):
            try:
                if lost is not None:
                    self._restore(lost)
                return work()
            except WorkerLostError as error:
                lost = error
        assert lost is not None
        raise lost

    def _restore(self, lost: WorkerLostError) -> None:
        """All workers anew, and the steps since the last copy run again; what they read is sent when they do."""
        state = self._state
        state.recoveries += 1
        self._progress(f"{lost.fact}; starting all workers again")
        self.close()
        self._fit()
        try:
            self.load()
        except ClusterError as error:
            # A machine that is gone may be counted for a while. It is a loss of the workers that were to be there.
            raise WorkerLostError(error.fact, cause=error.cause, remedy=error.remedy) from error
        for call in state.log:
            self._run(call, False)
        # What the steps made again and nobody has a handle to any more.
        state.dropped = sorted(state.holders.keys() - state.live)

    def _fit(self) -> None:
        """Another deployment where there is room for fewer processes than this one has."""
        if self._spare is None:
            return
        room, wanted = self._spare.room(), self.deployment.nodes or self.groups.num_processes
        if room >= wanted:
            return
        if room < 1:
            raise ClusterError("no machine is left to run on", remedy="add some, and restore the last checkpoint")
        self._progress(f"{room} of {wanted} nodes are left; planning for them")
        self.deployment = self._spare.deploy(room)
        self._exported = ()

    def _put_back(self, call: Call) -> None:
        """Sends what a step reads and only the driver still has, to the workers that read it."""
        state = self._state
        given: list[dict[int, Any]] = [{} for _ in range(self.source.num_workers)]
        names: list[dict[int, str]] = [{} for _ in range(self.source.num_workers)]
        for worker, places in enumerate(self.source.places):
            for p in places:
                id = call.inputs[p.index]
                if id not in call.given and id not in state.holders:
                    given[worker][id], names[worker][id] = state.copies[id], p.value
        if any(given):
            self._all("put", [(a, n) for a, n in zip(given, names, strict=True)], self.options.load_s)
            for worker, own in enumerate(names):
                for id, name in own.items():
                    state.holders.setdefault(id, {})[worker] = name

    def _copy(self) -> None:
        """Copies what lies on the workers and somebody has a handle to; steps before are not run again."""
        state = self._state
        found = self.fetch(sorted(state.live & (state.holders.keys() | state.copies.keys())))
        state.copies = found
        state.log.clear()

    # -- calls ---------------------------------------------------------------------------------

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]], limit_s: float) -> list[list[Any]]:
        """Calls a method of the processes of each worker; answers by worker. See `Session.call`."""
        return self.session.of_workers(method, arguments, limit_s, self._state.steps - 1)

    def _new_id(self) -> int:
        self._state.next_id += 1
        return self._state.next_id

    def _handle(self, id: int, shape: tuple[int, ...], dtype: Any, placement: str) -> RemoteArray:
        self._state.live.add(id)
        return RemoteArray(id, shape, dtype, placement, self, self._drop)

    def _drop(self, id: int) -> None:
        self._state.live.discard(id)
        self._state.dropped.append(id)


def _where(held: Mapping[int, str]) -> str:
    return ("workers " if len(held) > 1 else "worker ") + " and ".join(map(str, sorted(held)))


def to_host(value: Any) -> Any:
    """An array of the user on the host: numpy, or `HostKeys`."""
    if isinstance(value, HostKeys):
        return value
    return host_copy(value) if isinstance(value, jax.Array) else np.asarray(value)
