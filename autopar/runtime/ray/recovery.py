"""Recovery from lost workers: a state machine without I/O. Events go in, instructions come out.

The driver carries an instruction out and tells how it ended; the machine says what comes next. It begins with an
operation that somebody asked for and ends with `Finish` or `GiveUp`. A list of events is enough to replay any recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autopar.errors import WorkerLostError


@dataclass(frozen=True)
class RetryPolicy:
    """Policy of retries.

    Args:
        recover: whether lost workers are replaced at all.
        attempts: how often one operation may be begun.
        repeats: how often in a row it may fail at one place.
        backoff_s: seconds to wait before the third attempt; doubled with each that follows.
        most_backoff_s: seconds to wait at most.
    """

    recover: bool = False
    attempts: int = 10
    repeats: int = 3
    backoff_s: float = 0.5
    most_backoff_s: float = 30.0

    def wait_s(self, losses: int) -> float:
        """Seconds to wait after so many losses of one operation; the first one is answered at once."""
        return 0.0 if losses < 2 else min(self.most_backoff_s, self.backoff_s * 2.0 ** (losses - 2))


@dataclass(frozen=True)
class RecoveryPlace:
    """Place at which workers were lost.

    Args:
        doing: what the driver had them do: "launch", "replay" or "operate".
        step: number of the step that they ran; -1 where they ran none.
        worker: who is to blame; None where nobody is.
        instruction: that it was at; None where that is not known.
    """

    doing: str
    step: int
    worker: int | None
    instruction: str | None

    @property
    def is_known(self) -> bool:
        """Whether a loss here is that of an instruction, which the same program may cause again."""
        return self.instruction is not None


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requested:
    """Somebody asked for an operation.

    Args:
        running: whether workers are there.
        pending: calls that they have to repeat before.
    """

    running: bool
    pending: int = 0


@dataclass(frozen=True)
class Succeeded:
    """The last instruction was carried out.

    Args:
        pending: calls that the workers have to repeat.
    """

    pending: int = 0


@dataclass(frozen=True, eq=False)
class Lost:
    """Workers were lost while the last instruction was carried out."""

    error: WorkerLostError
    place: RecoveryPlace


Event: TypeAlias = Requested | Succeeded | Lost


# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start workers, for the nodes that are there."""


@dataclass(frozen=True)
class Replay:
    """Have the workers repeat the first call that they have not repeated."""


@dataclass(frozen=True)
class Operate:
    """Have the workers do what was asked for."""


@dataclass(frozen=True)
class End:
    """End all workers, and wait.

    Args:
        wait_s: seconds to wait before others are started.
    """

    wait_s: float


@dataclass(frozen=True)
class Finish:
    """Outcome of a recovery: the request is done."""


@dataclass(frozen=True, eq=False)
class GiveUp:
    """End all workers and raise the error.

    Args:
        error: the last loss.
        why: why it is not tried again, for the error; empty where recovery is off.
    """

    error: WorkerLostError
    why: str = ""


Instruction: TypeAlias = Launch | Replay | Operate | End | Finish | GiveUp


class Recovery:
    """The machine of one operation.

    Args:
        policy: when to try again.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._last: Instruction = Finish()
        self._places: list[RecoveryPlace] = []

    @property
    def losses(self) -> int:
        """Number of losses of workers in this operation."""
        return len(self._places)

    def handle(self, event: Event) -> Instruction:
        """The instruction that follows an event."""
        self._last = self._next(event)
        return self._last

    def _next(self, event: Event) -> Instruction:
        match event:
            case Requested(running=False):
                return Launch()
            case Lost(error=error, place=place):
                return self._after_loss(error, place)
            case Succeeded() if isinstance(self._last, Operate):
                return Finish()
            case Succeeded() if isinstance(self._last, End):
                return Launch()
        return Replay() if event.pending else Operate()

    def _after_loss(self, error: WorkerLostError, place: RecoveryPlace) -> Instruction:
        policy = self._policy
        self._places.append(place)
        if not policy.recover:
            return GiveUp(error)
        if self.losses >= policy.attempts:
            return GiveUp(error, f"{self.losses} attempts failed (attempts={policy.attempts})")
        last = self._places[-policy.repeats :]
        if place.is_known and len(last) == policy.repeats and set(last) == {place}:
            return GiveUp(error, f"{policy.repeats} attempts failed at the same place (repeats={policy.repeats})")
        return End(policy.wait_s(self.losses))
