"""`RemotePipeline`: the driver of workers in other processes: load once, then one call a worker and step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar._compat.dtypes import jax_dtype
from autopar.errors import AutoparError, WorkerLostError
from autopar.lower.pipeline.exported import ExportedProgram, export_maker, export_program
from autopar.runtime.ray.beacon import Monitor
from autopar.runtime.ray.crew import Crew
from autopar.runtime.ray.lost import Loss, lost_error, who_is_lost
from autopar.runtime.ray.messages import Done, Failure, Hello, Here, Load, Move, Start, Step, Timed, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.times import measured_timeline
from autopar.runtime.ray.values import RemoteArray
from autopar.runtime.transport.tiles import HostKeys, host_copy
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
    copies: dict[int, tuple[Any, dict[int, str]]] = field(default_factory=dict)
    log: list[Call] = field(default_factory=list)
    times: tuple[tuple[Timed, ...], ...] = ()
    recoveries: int = 0


class RemotePipeline:
    """A pipeline on workers.

    Args:
        source: the lowered pipeline.
        start: makes workers.
        options: see `RunOptions`.
        progress: told what is being done.
    """

    def __init__(
        self,
        source: Pipelined,
        start: Callable[[Sequence[Hello]], Crew],
        options: RunOptions,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self._start_crew = start
        self._progress = progress or (lambda text: None)
        self._crew: Crew | None = None
        self._monitor: Monitor | None = None
        self._exported: tuple[ExportedProgram, ...] = ()
        self._state = _State()
        self._x64 = bool(jax.config.read("jax_enable_x64"))

    # -- life ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Starts workers, which compile their programs and connect to each other; returns when all are ready."""
        source = self.source
        if not self._exported:
            self._progress(f"exporting {len(source.programs)} programs")
            self._exported = tuple(
                export_program(p, source.axes[p.work.stage], self.options.platform)
                for p in source.programs
                if p.results
            )
        secret = secrets.token_bytes(16)
        self._monitor = Monitor(secret, self.options.listen)
        self._progress(f"starting {source.num_workers} workers")
        hellos = [
            Hello(w, secret, self._monitor.address, self.options.listen, self._x64, self.options.cache)
            for w in range(source.num_workers)
        ]
        self._crew = self._start_crew(hellos)
        here = [decode(a, Here) for a in self._all("here", [()] * source.num_workers, self.options.load_s)]
        addresses = {w: h.address for w, h in enumerate(here)}
        self._progress("compiling")
        loads = []
        for w in range(source.num_workers):
            own = tuple(p for p in self._exported if p.work.stage in source.stages(w))
            loads.append((encode(Load(source.program.workers[w].instructions, own, addresses)),))
        self._all("load", loads, self.options.load_s)
        self._progress("ready")

    def close(self) -> None:
        """Ends the workers; arrays on them are gone."""
        if self._crew is not None:
            self._crew.kill()
        if self._monitor is not None:
            self._monitor.close()
        self._crew = self._monitor = None
        self._state.holders.clear()

    @property
    def crew(self) -> Crew:
        """The workers. AutoparError where none are loaded."""
        if self._crew is None:
            raise AutoparError("the pipeline has no workers", cause="it was closed, or never loaded", remedy="load it")
        return self._crew

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
        return {f"{name} on worker {w}": text for w, found in enumerate(answers) for name, text in found.items()}

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
                self._state.copies[id] = (host, held)
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
            for id, array in self._fetch(ids.values()).items():
                self._state.copies[id] = (array, held[id])
        return made

    def kept(self) -> list[int]:
        """Number of arrays that each worker keeps."""
        return self._all("forget", [((),)] * self.source.num_workers, self.options.deadline_s)

    def fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        """Copies of arrays on the host, by number. WorkerLostError where they are lost."""
        found: dict[int, Any] = self._again(lambda: self._fetch(ids))
        return found

    def _fetch(self, ids: Iterable[int]) -> dict[int, Any]:
        wanted: list[list[int]] = [[] for _ in range(self.source.num_workers)]
        for id in ids:
            held = self._state.holders.get(id)
            if not held:
                raise AutoparError("an array was lost with the workers that had it", remedy="use recover=True")
            wanted[min(held)].append(id)
        found: dict[int, Any] = {}
        for part in self._all("get", [(w,) for w in wanted], self.options.deadline_s):
            found.update(part)
        return found

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
                    moves.append(Move(id, min(state.holders[id]), worker))
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
            state.times = tuple(decode(a[0], Done).times for a in answers)
        return {id: array for _, small in answers for id, array in small.items()}

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
        """All workers anew, with the arrays of the last copy and the steps since then run again."""
        state = self._state
        state.recoveries += 1
        self._progress(f"{lost.fact}; starting all workers again")
        self.close()
        state.holders.clear()
        self.load()
        given: list[dict[int, Any]] = [{} for _ in range(self.source.num_workers)]
        names: list[dict[int, str]] = [{} for _ in range(self.source.num_workers)]
        for id, (host, held) in state.copies.items():
            for w, name in held.items():
                given[w][id], names[w][id] = host, name
            state.holders[id] = dict(held)
        self._all("put", [(a, n) for a, n in zip(given, names, strict=True)], self.options.load_s)
        for call in state.log:
            self._run(call, False)
        # What the steps made again and nobody has a handle to any more.
        state.dropped = sorted(state.holders.keys() - state.live)

    def _copy(self) -> None:
        """Copies what lies on the workers and somebody has a handle to; steps before are not run again."""
        state = self._state
        ids = sorted(state.live & state.holders.keys())
        found = self.fetch(ids)
        state.copies = {id: (found[id], dict(state.holders[id])) for id in ids}
        state.log.clear()

    # -- calls ---------------------------------------------------------------------------------

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]], limit_s: float) -> list[Any]:
        """Calls a method of all workers. WorkerLostError where one does not answer in time."""
        crew = self.crew
        tickets = {w: crew.call(w, method, *a) for w, a in enumerate(arguments)}
        answers: dict[int, Any] = {}
        losses: dict[int, Loss] = {}
        # Workers that wait for another one give up at the same limit: their answers say whom they waited for.
        until = time.monotonic() + limit_s + min(2.0, 0.5 * limit_s)
        while len(answers) + len(losses) < len(tickets) and time.monotonic() < until:
            waiting = [w for w in tickets if w not in answers and w not in losses]
            for position, answer in crew.wait([tickets[w] for w in waiting], 0.1).items():
                worker = waiting[position]
                failure = decode(answer.value[0], Done).failure if method == "step" and not answer.error else None
                if answer.error and not answer.lost:
                    failure = Failure(-1, "error", -1, answer.error)
                if answer.lost or failure is not None:
                    losses[worker] = Loss(answer.error if answer.lost else "", failure)
                else:
                    answers[worker] = answer.value
            gone = self._monitor.gone() if self._monitor else frozenset()
            for worker in sorted(gone & set(waiting) - answers.keys() - losses.keys()):
                losses[worker] = Loss("its process ended", None)
            if losses:
                until = min(until, time.monotonic() + 0.5)
        if len(answers) == len(tickets):
            return [answers[w] for w in range(len(tickets))]
        if self._monitor is not None:  # an answer that tells of the end of another may be faster than that end
            for worker in sorted(self._monitor.gone() - answers.keys()):
                losses[worker] = Loss("its process ended", None)
        silent = sorted(tickets.keys() - answers.keys() - losses.keys())
        last = {w: self._monitor.last(w) if self._monitor else (-1, -1) for w in tickets}
        worker, reason = who_is_lost(losses, silent, last, self.source, limit_s)
        raise lost_error(worker, reason, method, (self._state.steps - 1, last[worker][1]), self.source)

    def _new_id(self) -> int:
        self._state.next_id += 1
        return self._state.next_id

    def _handle(self, id: int, shape: tuple[int, ...], dtype: Any, placement: str) -> RemoteArray:
        self._state.live.add(id)
        return RemoteArray(id, shape, dtype, placement, lambda n: self.fetch([n])[n], self._drop)

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
