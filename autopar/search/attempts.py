"""Ways of planning a step that are tried one after another until one fits the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.recompute import Level
from autopar.search.problem import NotFasterError

_T = TypeVar("_T")


class Attempts(Generic[_T]):
    """Remembers what was tried, for the error where nothing fits.

    Args:
        attempt: plans for a number of microbatches and what is held. It may raise NotFasterError where that is found to
            take so many seconds; where it does not fit, the error says the least memory that would do only if the last
            argument says so.
    """

    def __init__(self, attempt: Callable[[int, Level, float, bool], _T]) -> None:
        self.attempt = attempt
        self.failures: dict[tuple[int, Level], InfeasiblePlanError] = {}
        self.impossible: dict[int, MicrobatchError] = {}
        self.not_faster: NotFasterError | None = None

    def first(self, ways: Iterable[tuple[int, Level]], cutoff_s: float = math.inf) -> _T | None:
        """What the first of ``ways`` that fits gives.

        None where none does, or the first that does is found to take ``cutoff_s`` seconds or more.
        """
        for count, level in ways:
            if count in self.impossible:
                continue
            try:
                return self.attempt(count, level, cutoff_s, False)
            except MicrobatchError as error:
                self.impossible[count] = error
            except NotFasterError as error:
                self.not_faster = error
                return None
            except InfeasiblePlanError as error:
                self.failures[count, level] = error
        return None

    def fastest(
        self,
        ways: Iterable[tuple[int, Level]],
        last: Callable[[_T], bool],
        seconds: Callable[[_T], float],
        cutoff_s: float = math.inf,
    ) -> _T | None:
        """The fastest of what ``ways`` give as far as they fit; None if none does.

        Args:
            ways: in order.
            last: whether what comes after one that fits need not be tried.
            seconds: how long one takes.
            cutoff_s: what takes as long is of no use.
        """
        fitting: list[_T] = []
        for way in ways:
            found = self.first([way], min(map(seconds, fitting), default=cutoff_s))
            if found is not None:
                fitting.append(found)
                if last(found):
                    break
        return min(fitting, key=seconds, default=None)

    def possible(self, counts: Sequence[int]) -> list[int]:
        """Those of ``counts`` that were not found to be impossible."""
        return [n for n in counts if n not in self.impossible]

    def error(self) -> InfeasiblePlanError | MicrobatchError:
        """Where there is none: of all that failed the one that came nearest to the memory, with what would do."""
        if self.not_faster is not None:
            return self.not_faster
        if not self.failures:
            return next(iter(self.impossible.values()))
        count, level = nearest = min(self.failures, key=lambda way: _least(self.failures[way]))
        try:
            self.attempt(count, level, math.inf, True)
        except InfeasiblePlanError as error:
            return _told(error, count, level)
        return _told(self.failures[nearest], count, level)  # a strategy that is stopped by the clock may find one now


def _least(error: InfeasiblePlanError) -> float:
    return math.inf if error.least_bytes is None else error.least_bytes


def _told(error: InfeasiblePlanError, count: int, level: Level) -> InfeasiblePlanError:
    """``error``, which says in what number of microbatches, and with what computed anew."""
    ways = [f"in {count} microbatches"] * (count > 1) + [f"with remat={level!r}"] * (level != "none")
    if not ways:
        return error
    return InfeasiblePlanError(
        f"{error.fact}, {' '.join(ways)}",
        cause=error.cause,
        remedy=error.remedy,
        source=error.source,
        least_bytes=error.least_bytes,
    )
