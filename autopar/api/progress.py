"""Progress of long calls: to the logger ``autopar``, to a function, or as a line that changes.

The line is shown on terminals and in notebooks, on standard error, when something takes longer than `AFTER_S`.
Elsewhere, as in the log of a job, a line is written then, and whenever twice as much time has passed.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])

#: Seconds after which the line appears, and between its changes.
AFTER_S, EVERY_S = 2.0, 0.5

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
        over = threading.Event()
        write = self._line if _shows_lines(stream) else self._lines
        line = threading.Thread(target=write, args=(stream, over), name="autopar progress", daemon=True)
        line.start()
        try:
            yield
        finally:
            over.set()
            line.join()
            self._depth -= 1

    def _line(self, stream: TextIO, over: threading.Event) -> None:
        began = time.monotonic()
        written = False
        while not over.wait(EVERY_S if written else self.after_s):
            text = f"autopar: {self._text or 'working'} ({time.monotonic() - began:.0f} s)"
            stream.write(f"\r{text[:_WIDTH]:<{_WIDTH}}")
            stream.flush()
            written = True
        if written:
            stream.write(f"\r{'':<{_WIDTH}}\r")
            stream.flush()

    def _lines(self, stream: TextIO, over: threading.Event) -> None:
        """Lines of a log: each after twice the time of the one before."""
        began, wait_s = time.monotonic(), self.after_s
        while not over.wait(wait_s):
            passed_s = time.monotonic() - began
            stream.write(f"autopar: {self._text or 'working'} ({passed_s:.0f} s)\n")
            stream.flush()
            wait_s = passed_s


def reporter_of(progress: Callable[[str], None] | bool | None) -> Reporter:
    """The reporter that an argument ``progress`` stands for: None and True show lines, False shows nothing."""
    if callable(progress):
        return Reporter(progress)
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
