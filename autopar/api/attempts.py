"""Ways of planning a step that are tried one after another until one fits the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.recompute import Level

_T = TypeVar("_T")


class Attempts(Generic[_T]):
    """Remembers what was tried, for the error where nothing fits.

    Args:
        attempt: plans for a number of microbatches and what is held; it may raise InfeasiblePlanError where that is
            found to take so many seconds.
    """

    def __init__(self, attempt: Callable[[int, Level, float], _T]) -> None:
        self.attempt = attempt
        self.failures: list[InfeasiblePlanError] = []
        self.impossible: dict[int, MicrobatchError] = {}

    def first(self, ways: Iterable[tuple[int, Level]], enough_s: float = math.inf) -> _T | None:
        """What the first of ``ways`` that fits gives, and takes less than ``enough_s``; None if none does."""
        for count, level in ways:
            if count in self.impossible:
                continue
            try:
                return self.attempt(count, level, enough_s)
            except MicrobatchError as error:
                self.impossible[count] = error
            except InfeasiblePlanError as error:
                self.failures.append(_told(error, count, level))
        return None

    def fastest(
        self, ways: Iterable[tuple[int, Level]], last: Callable[[_T], bool], seconds: Callable[[_T], float]
    ) -> _T | None:
        """The fastest of what ``ways`` give as far as they fit; None if none does.

        Args:
            ways: in order.
            last: whether what comes after one that fits need not be tried.
            seconds: how long one takes.
        """
        fitting: list[_T] = []
        for way in ways:
            found = self.first([way], min(map(seconds, fitting), default=math.inf))
            if found is not None:
                fitting.append(found)
                if last(found):
                    break
        return min(fitting, key=seconds, default=None)

    def possible(self, counts: Sequence[int]) -> list[int]:
        """Those of ``counts`` that were not found to be impossible."""
        return [n for n in counts if n not in self.impossible]

    def error(self) -> InfeasiblePlanError | MicrobatchError:
        """Of all that failed the one that came nearest to the memory."""
        if not self.failures:
            return next(iter(self.impossible.values()))
        return min(self.failures, key=lambda e: math.inf if e.least_bytes is None else e.least_bytes)


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
