"""Recovery as a machine: events go in, instructions come out; nothing runs."""

from __future__ import annotations

import pytest

from autopar.errors import WorkerLostError
from autopar.runtime.ray.ledger import Call, Ledger
from autopar.runtime.ray.recovery import (
    End,
    Finish,
    GiveUp,
    Launch,
    Lost,
    Operate,
    Recovery,
    RecoveryPlace,
    Replay,
    Requested,
    RetryPolicy,
    Succeeded,
)

ERROR = WorkerLostError("worker 1 was lost")
LOADING = RecoveryPlace("operate", 3, 1, None)
FORWARD = RecoveryPlace("operate", 3, 1, "FORWARD 1")


def lost(place: RecoveryPlace = LOADING) -> Lost:
    return Lost(ERROR, place)


def replayed(policy: RetryPolicy, *events: object) -> list[object]:
    machine = Recovery(policy)
    return [machine.handle(e) for e in events]  # type: ignore[arg-type]


def test_an_operation_that_succeeds() -> None:
    assert replayed(RetryPolicy(), Requested(True), Succeeded()) == [Operate(), Finish()]
    assert replayed(RetryPolicy(), Requested(False), Succeeded(), Succeeded()) == [Launch(), Operate(), Finish()]


def test_workers_are_replaced_and_calls_repeated() -> None:
    events = [Requested(True), lost(), Succeeded(2), Succeeded(2), Succeeded(1), Succeeded(), Succeeded()]
    want = [Operate(), End(0.0), Launch(), Replay(), Replay(), Operate(), Finish()]
    assert replayed(RetryPolicy(recover=True), *events) == want


def test_losses_while_workers_start_and_repeat_are_losses_too() -> None:
    events = [Requested(False), lost(), Succeeded(1), Succeeded(1), lost(), Succeeded(1), Succeeded(1), Succeeded()]
    want = [Launch(), End(0.0), Launch(), Replay(), End(0.5), Launch(), Replay(), Operate()]
    assert replayed(RetryPolicy(recover=True), *events) == want


def test_without_recovery_a_loss_is_the_end() -> None:
    _, last = replayed(RetryPolicy(), Requested(True), lost())
    assert isinstance(last, GiveUp)
    assert (last.error, last.why) == (ERROR, "")


def test_attempts_are_counted_and_told() -> None:
    policy = RetryPolicy(recover=True, attempts=3)
    events = [Requested(True), lost(), Succeeded(), Succeeded(), lost(), Succeeded(), Succeeded(), lost()]
    *_, last = replayed(policy, *events)
    assert isinstance(last, GiveUp)
    assert last.why == "3 attempts failed (attempts=3)"


@pytest.mark.parametrize(("places", "stops"), [([FORWARD] * 3, True), ([FORWARD, LOADING, FORWARD], False)])
def test_a_loss_that_repeats_at_one_place_stops_early(places: list[RecoveryPlace], stops: bool) -> None:
    events: list[object] = [Requested(True)]
    for place in places:
        events += [lost(place), Succeeded(), Succeeded()]
    instructions = replayed(RetryPolicy(recover=True, repeats=3), *events[:-2])
    assert isinstance(instructions[-1], GiveUp) == stops


def test_waiting_doubles_up_to_a_limit() -> None:
    policy = RetryPolicy(backoff_s=1, most_backoff_s=5)
    assert [policy.wait_s(n) for n in range(1, 7)] == [0, 1, 2, 4, 5, 5]


def test_the_ledger_keeps_what_pending_calls_need() -> None:
    """In the middle of repeating calls, a copy has the inputs of those that are left, with a handle or without."""
    ledger = Ledger()
    a, b, c = (ledger.new_id() for _ in range(3))
    ledger.copies = {a: "a"}
    ledger.log = [Call(0, 1, (a,), {}, (b,)), Call(1, 1, (b,), {}, (c,))]
    ledger.keep(c)
    assert ledger.pending == 2
    assert ledger.needed() == [a]
    ledger.held_by([b], [0])
    ledger.replayed()
    assert ledger.needed() == [b]
    ledger.copied({b: "b"})
    assert [call.results for call in ledger.log] == [(c,)]
    assert (ledger.pending, ledger.copies) == (1, {b: "b"})
    ledger.workers_lost()
    assert ledger.can_be_had(c)
    assert not ledger.can_be_had(a)


@pytest.mark.slow
def test_arrays_without_handles_are_forgotten_once() -> None:
    ledger = Ledger()
    ids = [ledger.new_id() for _ in range(3)]
    for id in ids:
        ledger.keep(id)
    ledger.held_by(ids, [0, 1])
    ledger.release(ids[1])
    assert ledger.drop_stale() == (ids[1],)
    assert ledger.drop_stale() == ()
    assert ledger.live == {ids[0], ids[2]}
