"""`Inbox`: what one sender sent, in order, a few arrays read ahead; what is left of a step that failed is dropped."""

from __future__ import annotations

import threading
import time
from collections import deque

from autopar.errors import ScheduleError
from autopar.runtime.transport.base import PeerLostError, SilentPeerError, StepAbortedError
from autopar.runtime.transport.frames import Frame

#: Arrays that are read ahead from a sender before it has to wait.
_AHEAD = 8


class Inbox:
    """Arrays of one sender.

    Args:
        source: number of the sender.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._aborted = -1

    def would_block(self, step: int) -> bool:
        """Whether `take` of a step would wait: nothing came for it, and nothing failed; older frames are dropped."""
        with self._changed:
            self._drop_older(step)
            return not self._frames and self._error is None and self._aborted < step

    def put(self, frame: Frame) -> None:
        """Adds a frame; waits while there are too many. EOFError where the inbox was closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) < _AHEAD or self._closed)
            if self._closed:
                raise EOFError("the receiver was closed")
            self._frames.append(frame)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def abort(self, step: int) -> None:
        """Ends all waiting for frames of a step and those before it."""
        with self._changed:
            self._aborted = max(self._aborted, step)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._closed = True
            self._error = self._error or EOFError("the connection was closed")
            self._changed.notify_all()

    def next_tag(self, step: int, from_s: float, until_s: float) -> int:
        """The tag of the frame that `take` would return; arguments and errors are its own."""
        with self._changed:
            return self._next(step, from_s, until_s).tag

    def take(self, step: int, from_s: float, until_s: float) -> Frame:
        """The next frame of a step; older ones are dropped.

        Args:
            step: number of the step.
            from_s: when waiting began, by the monotonic clock.
            until_s: when it ends.

        Raises:
            PeerLostError: the connection broke.
            SilentPeerError: nothing came in time.
            StepAbortedError: the step was given up.
            ScheduleError: a frame of a later step came.
        """
        with self._changed:
            self._next(step, from_s, until_s)
            self._changed.notify_all()
            return self._frames.popleft()

    def _next(self, step: int, from_s: float, until_s: float) -> Frame:
        while True:
            self._drop_older(step)
            if self._frames:
                if self._frames[0].step > step:
                    raise ScheduleError(f"worker {self._source} sent step {self._frames[0].step} in step {step}")
                return self._frames[0]
            if self._error is not None:
                raise PeerLostError(self._source, str(self._error)) from self._error
            if self._aborted >= step:
                raise StepAbortedError(step)
            left = until_s - time.monotonic()
            if left <= 0:
                raise SilentPeerError(self._source, time.monotonic() - from_s)
            self._changed.wait(left)

    def _drop_older(self, step: int) -> None:
        while self._frames and self._frames[0].step < step:
            self._frames.popleft()
            self._changed.notify_all()
