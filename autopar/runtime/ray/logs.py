"""Records of the logger ``autopar.ray``: a line for people, and the same as fields for programs."""

from __future__ import annotations

import logging
from typing import Any

_LOGGER = logging.getLogger("autopar.ray")


def record(event: str, text: str, level: int = logging.INFO, **fields: Any) -> None:
    """Logs an event.

    Args:
        event: its name, the same for all of its kind.
        text: for people.
        level: of `logging`.
        fields: numbers and names, of which a formatter finds the event as ``record.event`` and these as
            ``record.fields``.
    """
    _LOGGER.log(level, text, extra={"event": event, "fields": fields})
