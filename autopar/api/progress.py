"""Progress of long calls: to the logger ``autopar``, to a function, or as a line that changes.

The line is shown on terminals and in notebooks, on standard error, when something takes longer than `AFTER_S`.
Elsewhere, as in the log of a job, a line is written then, and whenever twice as much time has passed.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO, TypeVar, cast

from autopar._compat.reminders import ACTIVITY, AFTER_S, EVERY_S, reminders, timer
from autopar.errors import AutoparError

_F = TypeVar("_F", bound=Callable[..., Any])

_LOG = logging.getLogger("autopar")
_WIDTH = 100


class Reporter:
    """Called with a line of text when a phase begins.

    Args:
        function: called with each line too; None for none.
        live: whether lines are shown of what takes long.
        after_s: seconds after which it appears.
    """

    def __init__(
        self, function: Callable[[str], None] | None = None, *, live: bool = False, after_s: float = AFTER_S
    ) -> None:
        self.function = function
        self.live = live
        self.after_s = after_s
        self._text = ""
        self._depth = 0

    def __call__(self, text: str) -> None:
        """A phase begins."""
        _LOG.info(text)
        self._text = text
        if self.function is not None:
            self.function(text)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context that shows the last line that was reported; nested contexts share one line."""
        stream: TextIO | None = sys.stderr  # None in a program without a console
        if stream is None or not self.live or self._depth:
            yield
            return
        self._depth += 1
        self._text = ""
        try:
            with self._line(stream) if _shows_lines(stream) else reminders(self._reminded(stream), self.after_s):
                yield
        finally:
            self._depth -= 1

    @property
    def _now(self) -> str:
        return ACTIVITY.or_phase(self._text or "working")

    def _reminded(self, stream: TextIO) -> Callable[[float], None]:
        """A writer of lines of a log, for the seconds so far."""

        def write(passed_s: float) -> None:
            stream.write(f"autopar: {self._now} ({passed_s:.0f} s)\n")
            stream.flush()

        return write

    @contextmanager
    def _line(self, stream: TextIO) -> Iterator[None]:
        """A line that changes, and is gone at the end."""
        is_written = False

        def write(passed_s: float) -> float:
            nonlocal is_written
            is_written = True
            text = f"autopar: {self._now} ({passed_s:.0f} s)"
            stream.write(f"\r{text[:_WIDTH]:<{_WIDTH}}")
            stream.flush()
            return EVERY_S

        with timer(write, self.after_s):
            yield
        if is_written:
            stream.write(f"\r{'':<{_WIDTH}}\r")
            stream.flush()


def reporter_of(progress: Callable[[str], None] | bool | None) -> Reporter:
    """The reporter that an argument ``progress`` stands for: None and True show lines, False shows nothing.

    Raises:
        AutoparError: it is neither of these nor a function.
    """
    if callable(progress):
        return Reporter(progress)
    if not isinstance(progress, bool | None):
        raise AutoparError(
            f"progress={progress!r} cannot be called", remedy="progress=print, another function of a line, or False"
        )
    return Reporter(live=progress is not False)


def shown(method: _F) -> _F:
    """A method of something with ``options``, which shows its progress while it runs."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self.options.progress, "shown", nullcontext)
        with context():
            return method(self, *args, **kwargs)

    return cast(_F, wrapped)


def _shows_lines(stream: TextIO) -> bool:
    """Whether a line on ``stream`` can be written over: of a terminal, or of a notebook's kernel."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel")
