"""Seconds that users set in the environment."""

from __future__ import annotations

import os

from autopar.errors import ClusterError


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
