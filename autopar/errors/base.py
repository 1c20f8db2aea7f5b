"""`AutoparError` and its kinds."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, TypedDict, Unpack


class Parts(TypedDict, total=False):
    """Parts of an error after the fact; see `AutoparError`."""

    cause: str | None
    remedy: str | None
    source: str | None


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose.

    Args:
        fact: what happened, with the values involved.
        cause: the usual reason, if it is known.
        remedy: what the user can do about it, if anything.
        source: the user's own line, as ``file.py:12 (function)``.
    """

    def __init__(
        self, fact: str, *, cause: str | None = None, remedy: str | None = None, source: str | None = None
    ) -> None:
        self.fact = fact
        self.cause = cause
        self.remedy = remedy
        self.source = source
        Exception.__init__(self, self.text())  # a kind of `as_kind` has further bases, which take other arguments

    def __str__(self) -> str:
        return self.text()  # jax's JaxRuntimeError, a further base, prints what jax's runtime sets

    def text(self) -> str:
        """The whole message, one part a line."""
        parts = [self.fact]
        if self.source:
            parts.append(f"  at: {self.source}")
        if self.cause:
            parts.append(f"  usual cause: {self.cause}")
        if self.remedy:
            parts.append(f"  remedy: {self.remedy}")
        return "\n".join(parts)


def as_kind(error: AutoparError, kind: type[Exception]) -> AutoparError:
    """The error as one that is also of the type that `jax.jit` raises there, so that both are caught.

    Args:
        error: made, not raised yet.
        kind: a builtin exception, or one of jax's.
    """
    if isinstance(error, kind):
        return error
    both: AutoparError = _unpickled(type(error), kind, error.__dict__, error.args)
    return both


@cache
def _both(ours: Any, kind: Any) -> Any:
    """A class of both types under the name of the first."""

    def reduced(self: AutoparError) -> tuple[Any, ...]:
        return _unpickled, (ours, kind, self.__dict__, self.args)

    names = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    return type(ours.__name__, (ours, kind), {**names, "__reduce__": reduced})


def _unpickled(ours: Any, kind: Any, state: dict[str, Any], args: tuple[Any, ...]) -> Any:
    """A pickled error."""
    error = _both(ours, kind).__new__(_both(ours, kind))
    error.__dict__.update(state)
    error.args = args
    return error


class TraceError(AutoparError):
    """The function cannot be traced into a graph."""


class MicrobatchError(AutoparError):
    """The step cannot be split into microbatches: examples are mixed."""


class SliceError(AutoparError):
    """The step cannot be split into slices of tokens: a position reads later ones."""


class InfeasiblePlanError(AutoparError):
    """No plan meets the request; ``least_bytes`` is the least memory a device that would do.

    Args:
        least_bytes: bytes a device of the plan that needs least, or None where memory is not the reason.
    """

    def __init__(self, fact: str, *, least_bytes: int | None = None, **parts: Unpack[Parts]) -> None:
        self.least_bytes = least_bytes
        super().__init__(fact, **parts)


class ConstraintError(AutoparError):
    """A constraint that the user gave cannot hold, or names nothing."""


class ClusterError(AutoparError):
    """A cluster is unknown, its file is wrong, or it does not have what a plan needs."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, or is not there, of another structure, or damaged."""


class PlanMismatchError(AutoparError):
    """A plan was made for another program or another cluster."""


class WorkerLostError(AutoparError):
    """A worker died or stopped answering during a step.

    Args:
        worker: its number.
        stages: the stages that it holds.
        instruction: what it was doing, as text; None where it had not begun.
        microbatch: of that instruction; None where it belongs to none.
    """

    def __init__(
        self,
        fact: str,
        *,
        worker: int = -1,
        stages: tuple[int, ...] = (),
        instruction: str | None = None,
        microbatch: int | None = None,
        **parts: Unpack[Parts],
    ) -> None:
        self.worker = worker
        self.stages = stages
        self.instruction = instruction
        self.microbatch = microbatch
        super().__init__(fact, **parts)


class ProcessLostError(AutoparError):
    """A process of a `jax.distributed` world did not come, or is gone.

    Args:
        processes: their numbers.
    """

    def __init__(self, fact: str, *, processes: tuple[int, ...] = (), **parts: Unpack[Parts]) -> None:
        self.processes = processes
        super().__init__(fact, **parts)


class _OfProcessError(AutoparError):
    """An error of one process of a `jax.distributed` world.

    Args:
        process: its number.
    """

    def __init__(self, fact: str, *, process: int = -1, **parts: Unpack[Parts]) -> None:
        self.process = process
        super().__init__(fact, **parts)


class CallbackError(_OfProcessError):
    """A Python callback of a step raised an exception in another process of a `jax.distributed` world.

    ``process`` is the number of the first process with an exception.
    """


class ProcessMismatchError(_OfProcessError):
    """Processes of one `jax.distributed` world have different programs, options, versions or data.

    ``process`` is the number of the first that differs from process 0.
    """


class ScheduleError(AutoparError):
    """A pipeline schedule cannot be made, or a schedule or its instructions cannot run.

    Args:
        table: the schedule table as text, with the cell that failed between ``>`` and ``<``; None where none was made.
    """

    def __init__(self, fact: str, *, table: str | None = None, **parts: Unpack[Parts]) -> None:
        self.table = table
        super().__init__(fact, **parts)

    def text(self) -> str:
        """The whole message, the table last."""
        return super().text() + (f"\n{self.table.rstrip()}" if self.table else "")


def optional_module(name: str, package: str, missing: AutoparError) -> Any:
    """A module that imports an optional package.

    Args:
        name: of the module.
        package: top-level name of the package.
        missing: the error where the package is not installed; without another module the import fails as it does.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise missing from error
