"""Calls of all workers: a step, and arrays that are fetched, held for a checkpoint or read from one.

`run_step` sends each worker its inputs and returns what comes back. `fetch_arrays`, `hold_arrays` and `read_arrays`
are about arrays. When a call is made is decided in `autopar.runtime.ray.driver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.runtime.ray.deployment import Function
from autopar.runtime.ray.ledger import Call, Ledger
from autopar.runtime.ray.messages import (
    FileResult,
    Move,
    ReadRequest,
    Snapshot,
    Start,
    StepRequest,
    StepResult,
    Timed,
    decode,
    encode,
)
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.values import Writing
from autopar.runtime.shards import DamageError, Leaf, merged, write_shards
from autopar.runtime.transport.tiles import HostKeys, joined, on_host, tiled_host


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step.

    Args:
        small: small results by number of the array.
        times: for each worker when its instructions ran; empty where they were not timed.
        sent_bytes: that workers sent each other.
        queued: arrays that waited to be sent on one worker, at most.
        orders: by worker that of AMPNet's passes.
    """

    small: dict[int, Any]
    times: tuple[tuple[Timed, ...], ...]
    sent_bytes: int = 0
    queued: int = 0
    orders: tuple[str, ...] = ()


@dataclass
class _WorkerInputs:
    """Values sent to one worker."""

    starts: list[Start] = field(default_factory=list)
    given: dict[int, Any] = field(default_factory=dict)
    results: list[tuple[int, Any]] = field(default_factory=list)


def run_step(
    session: Session,
    ledger: Ledger,
    function: Function,
    call: Call,
    options: RunOptions,
    forget: tuple[int, ...] = (),
    timed: bool = False,
) -> StepOutcome:
    """Runs a step on workers that have loaded its function.

    Args:
        session: the workers.
        ledger: arrays and where they lie; told where the results are.
        function: what runs.
        call: the step.
        options: timeouts, recovery and transport of runs.
        forget: arrays on workers that nobody needs.
        timed: whether instructions are timed, for which workers wait for each program.

    Raises:
        WorkerLostError: workers were lost.
        AutoparError: a program failed, or an array of the call is lost.
    """
    source = function.source
    send_copies(session, ledger, function, call, options)
    parts, moves = _parts(ledger, source, call)
    messages = [
        StepRequest(
            function.number, call.number, tuple(of_worker.starts), tuple(moves), tuple(of_worker.results), forget,
            options.deadline_s, timed, order=order,
        )
        for of_worker, order in zip(parts, call.orders or [""] * len(parts), strict=True)
    ]  # fmt: skip
    answers = session.of_workers(
        "step",
        [(encode(m), of_worker.given) for m, of_worker in zip(messages, parts, strict=True)],
        options.deadline_s,
        source,
        call.number,
    )
    for move in moves:
        ledger.held_by([move.id], [move.target])
    for id, r in zip(call.results, source.results, strict=True):
        ledger.holders[id] = {r.worker}
    results = [[decode(result, StepResult) for result, _ in of_worker] for of_worker in answers]
    times = tuple(of_worker[0].times for of_worker in results) if timed else ()
    return StepOutcome(
        {id: array for (_, small), *_ in answers for id, array in small.items()},
        times,
        sum(t.sent_bytes for of_worker in results for t in of_worker),
        max(t.queued for of_worker in results for t in of_worker),
        tuple(of_worker[0].order for of_worker in results),
    )


def _parts(ledger: Ledger, source: Pipelined, call: Call) -> tuple[list[_WorkerInputs], list[Move]]:
    """Inputs and results of each worker, and arrays that go from worker to worker before the step."""
    moves: list[Move] = []
    parts = [_WorkerInputs() for _ in source.places]
    count = source.program.table.num_microbatches
    for worker, places in enumerate(source.places):
        for p in places:
            id = call.inputs[p.index]
            parts[worker].starts.append(Start(p.value, id, p.microbatches, p.dim, count, p.buffer, p.first))
            if id in call.given:
                parts[worker].given[id] = call.given[id]
            elif worker not in ledger.holders[id] and all((m.id, m.target) != (id, worker) for m in moves):
                moves.append(Move(id, min(ledger.holders[id]), worker, p.value))
    for id, r in zip(call.results, source.results, strict=True):
        parts[r.worker].results.append((id, r.buffer))
    return parts, moves


def send_copies(session: Session, ledger: Ledger, function: Function, call: Call, options: RunOptions) -> None:
    """Sends what a step reads and only the driver has, to the workers that read it."""
    source = function.source
    given: list[dict[int, Any]] = [{} for _ in range(source.num_workers)]
    names: list[dict[int, str]] = [{} for _ in range(source.num_workers)]
    for worker, places in enumerate(source.places):
        for p in places:
            id = call.inputs[p.index]
            if id in call.given or id in ledger.holders:
                continue
            if id not in ledger.copies:
                raise lost_array()
            # A batch is cut on the way into a step: it is sent as it is.
            given[worker][id], names[worker][id] = ledger.copies[id], "" if p.microbatches else p.value
    if not any(given):
        return
    calls: Sequence[tuple[Any, ...]] = [(function.number, a, n) for a, n in zip(given, names, strict=True)]
    session.of_workers("put", calls, options.load_s)
    for worker, names_of_worker in enumerate(names):
        ledger.held_by(names_of_worker, [worker])


def lost_array() -> AutoparError:
    """The error of an array that was on workers which are gone."""
    return AutoparError(
        "an array was lost with the workers that had it",
        cause="workers were lost or replaced, and the driver has no copy of it",
        remedy="use recover=True, or restore the last checkpoint",
    )


def fetch_arrays(session: Session, ledger: Ledger, ids: Iterable[int], options: RunOptions) -> dict[int, Any]:
    """Copies of arrays on the host, by number.

    Args:
        session: the workers.
        ledger: where arrays lie.
        ids: numbers of the arrays.
        options: timeouts, recovery and transport of runs.

    Raises:
        AutoparError: one is nowhere.
        WorkerLostError: workers were lost.
    """
    arrays: dict[int, Any] = {}
    wanted: list[list[int]] = [[] for _ in range(session.groups.num_workers)]
    for id in ids:
        held = ledger.holders.get(id)
        if held:
            wanted[min(held)].append(id)
        elif id in ledger.copies:
            arrays[id] = ledger.copies[id]
        else:
            raise lost_array()
    if any(wanted):
        answers = session.of_workers("get", [(w,) for w in wanted], options.deadline_s)
        for wanted_of_worker, parts in zip(wanted, answers, strict=True):
            arrays.update({id: on_host(joined([p[id] for p in parts])) for id in wanted_of_worker})
    return arrays


def host_bytes(array: Any) -> int:
    """Bytes of an array on the host."""
    data = array.data if isinstance(array, HostKeys) else array
    return int(data.nbytes)


def hold_arrays(session: Session, ledger: Ledger, names: Mapping[int, str], options: RunOptions) -> SnapshotOnWorkers:
    """Has workers keep arrays for a checkpoint until they are written.

    Args:
        session: the workers.
        ledger: where arrays lie.
        names: by number what each array is called in the checkpoint.
        options: timeouts, recovery and transport of runs.
    """
    names_of_workers: list[dict[int, str]] = [{} for _ in range(session.groups.num_workers)]
    copies: dict[str, Any] = {}
    for id, name in sorted(names.items()):
        held = ledger.holders.get(id)
        if held:
            # The one that has least to write.
            names_of_workers[min(held, key=lambda w: (len(names_of_workers[w]), w))][id] = name
        else:
            copies[name] = fetch_arrays(session, ledger, [id], options)[id]
    ticket = ledger.new_id()
    session.of_workers("hold", [(encode(Snapshot(ticket, n)),) for n in names_of_workers], options.deadline_s)
    return SnapshotOnWorkers(session, ticket, copies, options.load_s)


def read_arrays(
    session: Session, ledger: Ledger, folder: Path, leaves: Mapping[int, Leaf], options: RunOptions
) -> dict[int, int]:
    """Has workers read arrays of a checkpoint; numbers of the new arrays.

    Args:
        session: the workers.
        ledger: where arrays lie; told where the new ones do.
        folder: of the checkpoint.
        leaves: by number of an array that lies where the new one is to lie.
        options: timeouts, recovery and transport of runs.

    Raises:
        DamageError: a file is not what was written.
        WorkerLostError: workers were lost.
    """
    requests = [ReadRequest(str(folder.absolute()), {}, {}) for _ in range(session.groups.num_workers)]
    ids = {like: ledger.new_id() for like in sorted(leaves)}
    for like, id in ids.items():
        for worker in sorted(ledger.holders.get(like, (0,))):
            requests[worker].leaves[id] = leaves[like]
            requests[worker].like[id] = like
    answers = session.of_workers("read", [(encode(w),) for w in requests], options.load_s)
    for result in (decode(a, FileResult) for some in answers for a in some):
        if result.error:
            raise DamageError(result.file, result.error)
    for like, id in ids.items():
        ledger.held_by([id], ledger.holders.get(like, (0,)))
    return ids


@dataclass(frozen=True, eq=False)
class SnapshotOnWorkers(Writing):
    """Arrays that workers keep for a checkpoint.

    Args:
        session: the processes that have them.
        ticket: under which number.
        copies: by name those that the driver alone has, on the host.
        limit_s: seconds that writing may take.
    """

    session: Session
    ticket: int
    copies: Mapping[str, Any]
    limit_s: float

    def write(self, folder: Path, label: str) -> dict[str, list[Leaf]]:
        """Writes the arrays of a checkpoint, each process those that it has, while steps run."""
        count = self.session.groups.num_processes
        paths = [str((folder / f"{label}-process-{p:04d}.bin").absolute()) for p in range(count)]
        results = [
            decode(a, FileResult) for a in self.session.call("write", [(self.ticket, p) for p in paths], self.limit_s)
        ]
        failed = next((t for t in results if t.error), None)
        if failed is not None:
            raise OSError(failed.error)
        written = [t.written for t in results]
        if self.copies:
            tiles = ((n, tiled_host(a)) for n, a in sorted(self.copies.items()))
            written.append(write_shards(folder / f"{label}-driver.bin", tiles))
        return merged(written)
