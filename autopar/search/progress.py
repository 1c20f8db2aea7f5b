"""`Progress`: what a strategy says while it searches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A better answer than all before it in the same search.

    Args:
        strategy: name of the search.
        seconds: wall-clock seconds since the search began.
        objective_s: predicted seconds of a step of the best answer so far.
        steps: choices that were evaluated until then; 0 where a strategy does not count.
    """

    strategy: str
    seconds: float
    objective_s: float
    steps: int = 0
