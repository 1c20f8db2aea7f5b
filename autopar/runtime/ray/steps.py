"""A step as calls of all workers: what each is sent, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.runtime.ray.function import Function
from autopar.runtime.ray.ledger import Call, Ledger
from autopar.runtime.ray.messages import Move, Start, StepRequest, StepResult, Timed, decode, encode
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.session import Session
from autopar.runtime.ray.source import Pipelined


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
        options: see `RunOptions`.
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
    """Sends what a step reads and only the driver has, to the workers that read it; see `run_step`."""
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
