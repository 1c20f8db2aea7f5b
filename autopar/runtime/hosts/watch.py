"""Heartbeats: each process of a world sees when another one is gone, also while its main thread waits for it.

`watch` begins it, `ProcessWatch` does it. `seconds_of` reads the variables of the environment that set how long.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from autopar._compat.world import SilenceError, World
from autopar.errors import ClusterError, ProcessLostError

#: Name of the variable with the seconds after which a silent process is taken for lost.
HEARTBEAT_VARIABLE = "AUTOPAR_HEARTBEAT_S"
_HEARTBEAT_S = 60.0
#: Exit code of a process that another one's end ended.
LOST = 82
#: Signs of life in the time after which a process is taken for lost; seconds between them at most.
_BEATS = 5
_LONGEST_S = 5.0
#: Seconds that the main thread has to raise the error itself.
_GRACE_S = 2.0
_NAME = "autopar-watch"
_ENDED, _FAILED = b"ended", b"failed"


def seconds_of(variable: str, default_s: float) -> float:
    """The positive number of seconds in a variable of the environment; ``default_s`` where it is not set.

    Raises:
        ClusterError: the text is no positive number.
    """
    text = os.environ.get(variable)
    if text is None:
        return default_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ClusterError(f"{variable}={text!r} is not a number of seconds", remedy=f"{variable}=60")
    return seconds


def heartbeat_s() -> float:
    """Seconds after which a silent process is taken for lost. ClusterError where the variable is no number."""
    return seconds_of(HEARTBEAT_VARIABLE, _HEARTBEAT_S)


class ProcessWatch(threading.Thread):
    """Tells the others that this process lives, and ends it where one of them does not.

    Args:
        world: the processes.
        limit_s: seconds after which a silent one is taken for lost.
    """

    def __init__(self, world: World, limit_s: float) -> None:
        super().__init__(name=_NAME, daemon=True)
        self._world = world
        self._limit_s = limit_s
        self._stopped = threading.Event()
        self.lost: ProcessLostError | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Beats and listens until this process ends, or another one did."""
        seen: dict[str, tuple[bytes, float]] = {}
        number, silent = 0, 0
        limit = f"{self._limit_s:g} s ({HEARTBEAT_VARIABLE})"
        while not self._stopped.wait(min(_LONGEST_S, self._limit_s / _BEATS)):
            number += 1
            try:
                self._world.put(self._key(), str(number).encode())
                beats = self._world.folder("autopar/beat")
                silent = 0
            except SilenceError:
                silent += 1
                if silent > _BEATS:
                    self._end(self._error(0, "does not answer"))
                continue
            now = time.monotonic()
            for process, beat in beats.items():
                if beat != seen.get(process, (b"", now))[0] or process not in seen:
                    seen[process] = beat, now
                if beat.startswith(_FAILED):
                    reason = beat.decode(errors="replace").partition(" ")[2]
                    self._end(self._error(int(process), f"failed: {reason}"))
                elif beat != _ENDED and now - seen[process][1] > self._limit_s:
                    self._end(self._error(int(process), f"gave no sign of life for {limit}"))

    def stop(self) -> None:
        """Tells the others how this process ends, which is in order unless an exception went unhandled."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        error = getattr(sys, "last_value", None)
        said = _ENDED if error is None else _FAILED + f" {short_text(error)}".encode()
        try:
            self._world.put(self._key(), said)
        except SilenceError:
            return

    def raise_if_lost(self) -> None:
        """Raises ProcessLostError where a process is gone."""
        if self.lost is not None:
            self.ended.set()
            raise self.lost

    def wait_for_loss(self) -> ProcessLostError | None:
        """The error of a process that is gone, waited for as long as that may take to be seen."""
        until = time.monotonic() + self._limit_s + _GRACE_S
        while self.lost is None and self.is_alive() and time.monotonic() < until:
            time.sleep(0.05)
        self.ended.set()
        return self.lost

    def _key(self) -> str:
        return f"autopar/beat/{self._world.process}"

    def _error(self, process: int, how: str) -> ProcessLostError:
        return ProcessLostError(
            f"process {process} of {self._world.processes} {how}",
            cause="it raised an error, was killed, or its host is gone: the others cannot go on without it",
            remedy="look at its output; `autopar run` starts all processes again, and step.restore the last checkpoint",
            processes=(process,),
        )

    def _end(self, error: ProcessLostError) -> None:
        """Lets the main thread raise ``error``; ends this process where it waits for what never comes."""
        if self.lost is None:
            self.lost = error
            if not self.ended.wait(_GRACE_S):
                print_and_exit(error)
        self._stopped.wait(self._limit_s)


def short_text(error: BaseException) -> str:
    """An error's type and the beginning of its message, to be told to other processes."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def print_and_exit(error: ProcessLostError) -> None:
    """Ends this process at once: jax's own way out waits for the process that is gone."""
    print(f"{type(error).__module__}.{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST)


def watched() -> ProcessWatch | None:
    """The watch of this process's world; None where there is none."""
    return next((t for t in threading.enumerate() if isinstance(t, ProcessWatch)), None)


def watch(world: World) -> ProcessWatch:
    """Begins to watch the others, unless it was begun: by the first thing that all do together."""
    watching = watched()
    if watching is not None:
        return watching
    new_watch = ProcessWatch(world, heartbeat_s())
    new_watch.start()
    atexit.register(new_watch.stop)
    sys.excepthook = _Hook(new_watch, sys.excepthook)
    return new_watch


class _Hook:
    """Prints an unhandled error of jax with the reason: a process that is gone.

    Args:
        watching: what knows.
        before: the hook that was there.
    """

    def __init__(self, watching: ProcessWatch, before: object) -> None:
        self._watching = watching
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, at: TracebackType | None) -> None:
        if callable(self._before):
            self._before(kind, value, at)
        else:
            traceback.print_exception(kind, value, at)
        if isinstance(value, ProcessLostError):
            print_and_exit(value)
        elif issubclass(kind, jax.errors.JaxRuntimeError):
            lost = self._watching.wait_for_loss()
            if lost is not None:
                print_and_exit(lost)
