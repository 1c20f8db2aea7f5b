"""`Trials`: the one loop over configurations of a step, of one stage and of many, and its one way of bounding.

A configuration is planned unless it is known that the step cannot be cut so. It is given the seconds that its plan must
stay below: those of the fastest plan so far, or of a plan that is at hand. What fails is kept for the error where
nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.search.outcome import Bounded


class Configuration(Protocol):
    """A choice of what is free, equal and with the same hash where it is the same; it may be planned."""

    @property
    def count(self) -> int:
        """Number of microbatches."""

    def described(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        """The error of its planning, which says which configuration it is."""


C = TypeVar("C", bound=Configuration)
T = TypeVar("T")


class Trials(Generic[C, T]):
    """Plans configurations one after another and remembers what failed, and the least bound of what was closed.

    Args:
        attempt: plans a configuration, which must stay below so many seconds, else the answer may be `Bounded`. Where
            it does not fit, the error says the least memory that would do only if the last argument says so.
        ends: whether no more is tried once something failed, because nothing can fit.
    """

    def __init__(self, attempt: Callable[[C, float, bool], T | Bounded], ends: Callable[[], bool] = bool) -> None:
        self.attempt = attempt
        self.ends = ends
        self.failures: dict[C, InfeasiblePlanError] = {}
        self.impossible: dict[int, MicrobatchError] = {}
        self.bounded: Bounded | None = None

    def run(
        self,
        configurations: Iterable[C],
        *,
        cutoff_s: float = math.inf,
        seconds: Callable[[T], float] | None = None,
        ends: Callable[[T], bool] = lambda _: False,
        ends_when_slower: bool = False,
    ) -> list[T]:
        """The plans of configurations, as far as they fit.

        Args:
            configurations: in order; they may depend on what was planned before.
            cutoff_s: seconds from which a plan is of no use.
            seconds: of a plan: those of the fastest so far replace ``cutoff_s``. Without it all are wanted.
            ends: whether none is tried after a plan.
            ends_when_slower: whether none is tried after one that is found to take ``cutoff_s`` or more.
        """
        plans: list[T] = []
        for configuration in configurations:
            if self.failures and self.ends():
                break
            if configuration.count in self.impossible:
                continue
            fastest_s = min(map(seconds, plans), default=cutoff_s) if seconds else cutoff_s
            try:
                answer = self.attempt(configuration, fastest_s, False)
            except MicrobatchError as error:
                self.impossible[configuration.count] = error
                continue
            except InfeasiblePlanError as error:
                self.failures[configuration] = error
                continue
            if isinstance(answer, Bounded):
                self.bounded = min(filter(None, (self.bounded, answer)), key=lambda bounded: bounded.least_s or 0.0)
                if ends_when_slower:
                    break
                continue
            plans.append(answer)
            if ends(answer):
                break
        return plans

    def first(self, configurations: Iterable[C], cutoff_s: float = math.inf) -> T | None:
        """The plan of the first configuration that fits.

        None where none does, or the first that does is found to take ``cutoff_s`` seconds or more.
        """
        plans = self.run(configurations, cutoff_s=cutoff_s, ends=lambda _: True, ends_when_slower=True)
        return plans[0] if plans else None

    def possible(self, counts: Sequence[int]) -> list[int]:
        """Numbers of microbatches that are not known to be impossible."""
        return [n for n in counts if n not in self.impossible]

    def error(self) -> InfeasiblePlanError | MicrobatchError:
        """Where nothing is planned: of all that failed the one that came nearest to the memory, with what would do."""
        if not self.failures:
            return next(iter(self.impossible.values()))
        nearest = min(self.failures, key=lambda configuration: _least(self.failures[configuration]))
        try:
            self.attempt(nearest, math.inf, True)
        except InfeasiblePlanError as error:
            return nearest.described(error)
        # A strategy that is stopped by the clock may find one now.
        return nearest.described(self.failures[nearest])


def _least(error: InfeasiblePlanError) -> float:
    return math.inf if error.least_bytes is None else error.least_bytes
