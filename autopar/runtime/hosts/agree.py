"""Processes compare what they are about to do, and take one process's result, by jax's coordination service.

Everything that all processes do together has a turn: the first on each process meets the first on all others. Process 0
reads what every process says of its turn and tells them the verdict, so that each makes a few calls however many there
are.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import msgspec

from autopar._compat.world import SilenceError, World
from autopar.errors import AutoparError, ProcessLostError, ProcessMismatchError
from autopar.runtime.hosts.watch import seconds_of, watch

#: A fact that must be the same on all processes: what it is of, and its value as text.
Fact = tuple[str, str]

#: Name of the variable with the seconds that a process waits for the others to come to the same call.
WAIT_VARIABLE = "AUTOPAR_WAIT_S"
_WAIT_S = 120.0
#: Process 0 answers so much later than it gives up waiting, at most.
_MARGIN_S = 5.0
#: So often is looked whether all processes are still there while one is waited for.
_POLL_S = 1.0


class _Statement(msgspec.Struct, frozen=True):
    """A process's message in a turn: a hash of its facts, and the values that it shares with some others."""

    facts: bytes
    shared: dict[str, str]


class _Verdict(msgspec.Struct, frozen=True):
    """The answer of process 0 in a turn: missing processes, differing ones, and values that two have in different
    forms.
    """

    missing: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    name: str = ""
    pair: tuple[int, int] = (0, 0)


class _Gathered(msgspec.Struct, frozen=True):
    """Values of all processes, by process, or the processes that did not come."""

    values: tuple[bytes, ...] = ()
    missing: tuple[int, ...] = ()


class _Outcome(msgspec.Struct, frozen=True):
    """The result of process 0, or the error that it ended with."""

    value: bytes = b""
    error: str = ""
    parts: tuple[str, str, str] = ("", "", "")
    failed: bool = False


def wait_s() -> float:
    """Seconds that a process waits for the others to come to the same call. ClusterError where it is no number."""
    return seconds_of(WAIT_VARIABLE, _WAIT_S)


@dataclass(frozen=True)
class Agreement:
    """One thing that all processes do together.

    Args:
        world: the processes.
        number: how many came before it.
        what: it, for messages.
        limit_s: seconds that the others are waited for.
    """

    world: World
    number: int
    what: str
    limit_s: float

    @staticmethod
    def next(world: World, what: str, limit_s: float | None = None) -> Agreement:
        """The next one. Raises ProcessLostError where a process is gone.

        Args:
            world: the processes.
            what: what they do together, for messages.
            limit_s: seconds that the others are waited for; None is `wait_s`.
        """
        watch(world).raise_if_lost()
        try:
            number = world.count(f"autopar/turns/{world.process}")
            if world.process == 0 and number > 2:
                world.forget(f"autopar/turn/{number - 2}")
        except SilenceError as error:
            raise _gone(0, what) from error
        return Agreement(world, number, what, wait_s() if limit_s is None else limit_s)

    def compare(self, facts: Sequence[Fact], shared: Mapping[str, str] = MappingProxyType({})) -> None:
        """Returns when all processes came to this turn with the same facts.

        Args:
            facts: the same on all processes.
            shared: what only some have, the same on all that have it.

        Raises:
            ProcessMismatchError: one has others; it names the process and the first fact that differs.
            ProcessLostError: one did not come in time.
        """
        whole = [("call", self.what), *facts]
        said = _Statement(hashlib.sha256(json.dumps(whole).encode()).digest(), dict(shared))
        try:
            self.world.put(self._key(f"said/{self.world.process}"), msgspec.msgpack.encode(said))
            verdict = self._judge(said) if self.world.process == 0 else self._verdict()
            if verdict.missing:
                raise self._missing(verdict.missing)
            if verdict.differing:
                raise self._differing(whole, verdict.differing)
            if verdict.name:
                raise self._mismatch(verdict)
        except SilenceError as error:
            raise self._missing((0,)) from error
        # The first look at devices waits for all processes: none may do it while others wait for its plan.
        jax.devices()

    def gather(self, value: bytes) -> list[bytes]:
        """Values of all processes, by process, on every process. ProcessLostError where one does not come."""
        try:
            if self.world.process == 0:
                gathered = self._gathered(value)
                self.world.put(self._key("gathered"), msgspec.msgpack.encode(gathered))
            else:
                self.world.put(self._key(f"given/{self.world.process}"), value)
                raw = self._get("gathered", self.limit_s + _MARGIN_S)
                gathered = msgspec.msgpack.decode(raw, type=_Gathered)
        except SilenceError as error:
            raise (self._missing((0,)) if error.late else _gone(0, self.what)) from error
        if gathered.missing:
            raise self._missing(gathered.missing)
        return list(gathered.values)

    def _gathered(self, value: bytes) -> _Gathered:
        """Values that processes gave, read by process 0.

        Args:
            value: of process 0.
        """
        values, missing, until = [value], [], time.monotonic() + self.limit_s
        for process in range(1, self.world.processes):
            try:
                values.append(self._get(f"given/{process}", max(0.01, until - time.monotonic())))
            except SilenceError:
                missing.append(process)
        return _Gathered(() if missing else tuple(values), tuple(missing))

    def take(self, make: Callable[[], bytes]) -> bytes:
        """The result of ``make`` on process 0; an AutoparError there is raised on all.

        Args:
            make: called on process 0 alone.

        Raises:
            ProcessLostError: process 0 is gone.
        """
        if self.world.process == 0:
            return self._made(make)
        try:
            outcome = msgspec.msgpack.decode(self._get("made", math.inf), type=_Outcome)
        except SilenceError as error:
            raise _gone(0, self.what) from error
        if outcome.failed:
            raise _error_of_process_0(outcome)
        return outcome.value

    def _made(self, make: Callable[[], bytes]) -> bytes:
        try:
            value = make()
        except BaseException as error:
            autopar_error = error if isinstance(error, AutoparError) else None
            parts = (
                (autopar_error.fact, autopar_error.cause or "", autopar_error.remedy or "")
                if autopar_error
                else (f"process 0 failed: {error!r}", "", "")
            )
            outcome = _Outcome(b"", type(error).__name__ if autopar_error else "AutoparError", parts, True)
            self.world.put(self._key("made"), msgspec.msgpack.encode(outcome))
            raise
        self.world.put(self._key("made"), msgspec.msgpack.encode(_Outcome(value)))
        return value

    def _key(self, name: str) -> str:
        return f"autopar/turn/{self.number}/{name}"

    def _get(self, name: str, limit_s: float) -> bytes:
        """A value of this turn. SilenceError where it does not come in time, ProcessLostError where one is gone."""
        watching, until = watch(self.world), time.monotonic() + limit_s
        while True:
            left = until - time.monotonic()
            try:
                return self.world.get(self._key(name), max(0.01, min(_POLL_S, left)))
            except SilenceError as error:
                watching.raise_if_lost()
                if not error.late or left <= _POLL_S:
                    raise

    def _judge(self, statement_here: _Statement) -> _Verdict:
        until = time.monotonic() + self.limit_s
        missing, differing = [], []
        first = {name: (0, value) for name, value in statement_here.shared.items()}
        name, pair = "", (0, 0)
        for process in range(1, self.world.processes):
            try:
                raw = self._get(f"said/{process}", max(0.01, until - time.monotonic()))
            except SilenceError:
                missing.append(process)
                continue
            said = msgspec.msgpack.decode(raw, type=_Statement)
            if said.facts != statement_here.facts:
                differing.append(process)
            for n, value in said.shared.items():
                other, before = first.setdefault(n, (process, value))
                if before != value and not name:
                    name, pair = n, (other, process)
        verdict = _Verdict(tuple(missing), tuple(differing), name, pair)
        self.world.put(self._key("verdict"), msgspec.msgpack.encode(verdict))
        return verdict

    def _verdict(self) -> _Verdict:
        return msgspec.msgpack.decode(self._get("verdict", self.limit_s + _MARGIN_S), type=_Verdict)

    def _missing(self, processes: Sequence[int]) -> ProcessLostError:
        names = ", ".join(map(str, processes))
        return ProcessLostError(
            f"process {names} of {self.world.processes} did not come to {self.what} within {self.limit_s:g} s",
            cause="it ended, or does something that the others do not: every process runs the same script",
            remedy=f"look at its output; {WAIT_VARIABLE} gives it more time",
            processes=tuple(processes),
        )

    def _mismatch(self, verdict: _Verdict) -> ProcessMismatchError:
        first, second = verdict.pair
        return ProcessMismatchError(
            f"process {second} differs from process {first} in {self.what}: {verdict.name} has other values there",
            cause="devices of both processes have the same examples, which each read for itself",
            remedy="read the examples that step.process_examples() names",
            process=second,
        )

    def _differing(self, facts: Sequence[Fact], differing: Sequence[int]) -> ProcessMismatchError:
        """The error on every process, from what process 0 and the first one that differs say."""
        other = differing[0]
        if self.world.process in (0, other):
            self.world.put(self._key(f"whole/{self.world.process}"), json.dumps(facts).encode())
        first, second = ([tuple(f) for f in json.loads(self._get(f"whole/{p}", self.limit_s))] for p in (0, other))
        fact = _first_difference(first, second, other)
        also = f"; so do processes {', '.join(map(str, differing[1:]))}" if len(differing) > 1 else ""
        return ProcessMismatchError(
            f"process {other} differs from process 0 in {self.what}: {fact}{also}",
            cause="processes run different scripts, versions or options, or read different data where it must be equal",
            remedy="start the same script with the same arguments and environment on every host",
            process=other,
        )


def _first_difference(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]], other: int) -> str:
    for (name, value), (other_name, other_value) in zip(first, second, strict=False):
        if name != other_name:
            return f"process 0 has {name} ({value}) where process {other} has {other_name} ({other_value})"
        if value != other_value:
            return f"{name} is {other_value} there and {value} on process 0"
    more, who = (first, 0) if len(first) > len(second) else (second, other)
    name, value = more[min(len(first), len(second))]
    return f"only process {who} has {name} ({value})"


def _gone(process: int, what: str) -> ProcessLostError:
    return ProcessLostError(
        f"process {process} is gone; it was wanted for {what}",
        cause="it failed, was killed, or its host is gone",
        remedy="look at its output; `autopar run` starts all processes again",
        processes=(process,),
    )


def _error_of_process_0(outcome: _Outcome) -> AutoparError:
    """The error that process 0 ended with."""
    kinds = {kind.__name__: kind for kind in _kinds(AutoparError)}
    fact, cause, remedy = outcome.parts
    return kinds.get(outcome.error, AutoparError)(fact, cause=cause or None, remedy=remedy or None)


def _kinds(kind: type[AutoparError]) -> list[type[AutoparError]]:
    return [kind, *(k for sub in kind.__subclasses__() for k in _kinds(sub))]
