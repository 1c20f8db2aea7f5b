"""Decorated functions that are called while another one is traced: what they were told is noted for its plan.

`trace` collects, `note` is called by the inner function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NOTES: ContextVar[dict[str, None] | None] = ContextVar("autopar_nested", default=None)


@contextmanager
def collected() -> Iterator[dict[str, None]]:
    """Collects the texts that `note` is given while the body runs, each once and in order, as keys."""
    notes: dict[str, None] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note(text: str) -> None:
    """Adds a text to those of the function that is being traced; does nothing where none is."""
    notes = _NOTES.get()
    if notes is not None:
        notes[text] = None
