"""A search that ends before its end, by a time limit or by Ctrl-C: the best plan known is the answer.

The planner has an `Incumbent`; what searches offers it every whole plan and asks it between two pieces of work whether
to go on. Nothing that was cut short is kept: the search unwinds by an exception, past everything that keeps plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from autopar.plan import Plan
from autopar.plan.text import USELESS, gap_of, gap_text, seconds_text


class SearchEndedError(Exception):
    """The time or the budget is up, and a plan is known.

    Args:
        cause: which of them, in words.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Anytime(Protocol):
    """A search that can end before it is done: it offers whole plans, and asks whether to go on."""

    def offer(self, plan: Plan) -> None:
        """Takes note of a whole plan."""

    def checkpoint(self) -> None:
        """Raises `SearchEndedError` where the time is up and a plan is known."""

    def spent(self, work: int) -> None:
        """Raises `SearchEndedError` where so many work units are too many and a plan is known."""


@dataclass(eq=False)
class Incumbent:
    """The best plan known.

    Args:
        deadline: of `time.monotonic`, from which on the search ends as soon as a plan is known.
        best: the plan; None until one is offered.
        began_s: `time.monotonic` when the search began.
        one_stage: the fastest plan of one stage.
        history: (seconds since the search began, step time) of each plan that was the best known.
        budget: work units from which on the search ends as soon as a plan is known; None for any number.
    """

    deadline: float = math.inf
    best: Plan | None = None
    began_s: float = field(default_factory=time.monotonic)
    one_stage: Plan | None = None
    history: list[tuple[float, float]] = field(default_factory=list)
    budget: int | None = None

    @staticmethod
    def within(time_limit_s: float | None, budget: int | None = None) -> Incumbent:
        """The incumbent of a search that begins now and may take so many seconds and units; None for any number."""
        deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        return Incumbent(deadline, budget=budget)

    def offer(self, plan: Plan) -> None:
        """Takes note of a whole plan, so that it is returned if the search ends early."""
        if plan.num_stages == 1 and (self.one_stage is None or plan.step_time < self.one_stage.step_time):
            self.one_stage = plan
        if self.best is None or plan.step_time < self.best.step_time:
            self.best = plan
            self.history.append((time.monotonic() - self.began_s, plan.step_time))

    def checkpoint(self) -> None:
        """Raises `SearchEndedError` where the time is up and a plan is known."""
        if self.best is not None and time.monotonic() >= self.deadline:
            raise SearchEndedError("its time limit")

    def spent(self, work: int) -> None:
        """Raises `SearchEndedError` where ``work`` reaches the budget of work units and a plan is known."""
        if self.best is not None and self.budget is not None and work >= self.budget:
            raise SearchEndedError(f"its budget of {self.budget:,} work units")

    def fastest(self, plan: Plan, least_gain: float) -> Plan:
        """The answer of a search, or the fastest offer of one stage where that saves more than a share of its step.

        Sums of seconds say what is solved to the end, and a relaxation that they leave out may hide more messages.
        Offers of several stages that are not the answer have schedules whose launches cost more than they save.

        Args:
            plan: the answer.
            least_gain: the share.
        """
        return faster_by(plan, self.one_stage, least_gain)

    def telling(self, log: Callable[[str], None]) -> Callable[[str], None]:
        """``log`` with the best plan known and the seconds of searching after each line."""

        def line(text: str) -> None:
            best = self.best
            if best is not None:
                gap, bound_s = best.search.gap, best.search.lower_bound
                least = (
                    "" if gap is None else f", {gap_text(gap) if gap > USELESS else 'bound ' + seconds_text(bound_s)}"
                )
                elapsed_s = time.monotonic() - self.began_s
                text = f"{text} (best so far {seconds_text(best.step_time)}{least}; {elapsed_s:.1f} s elapsed)"
            log(text)

        return line

    def cut_short(self, cause: str) -> Plan | None:
        """The best plan with a note that the search ended early; None where none is known.

        Args:
            cause: why it ended.
        """
        if self.best is None:
            return None
        gap = gap_of(self.best.search.lower_bound, self.best.step_time)
        more = "a longer search may find better"
        if gap is not None and gap <= USELESS:
            more = f"a longer search, or effort='high', may save {gap:.1%} of the step at most"
        note = f"the search was ended by {cause}: this is the best plan until then, and {more}"
        content = msgspec.structs.replace(self.best.content, notes=(*self.best.content.notes, note))
        return replace(self.best, content=content)


def faster_by(plan: Plan, other: Plan | None, least_gain: float) -> Plan:
    """``other``, if it takes less by more than a share of the step of ``plan``; else ``plan``."""
    if other is None or other.step_time >= (1 - least_gain) * plan.step_time:
        return plan
    return replace(other, phases=plan.phases)


@dataclass(frozen=True)
class OfParts:
    """Ends a search for plans of parts of a step in time, and keeps none of them: they are no plans of the whole step.

    Args:
        of: says whether to go on.
    """

    of: Anytime

    def offer(self, plan: Plan) -> None:
        """Ignores the plan, which is of a part of the step."""

    def checkpoint(self) -> None:
        """Raises `SearchEndedError` where the time is up and a plan is known."""
        self.of.checkpoint()

    def spent(self, work: int) -> None:
        """Raises `SearchEndedError` where ``work`` reaches the budget of work units and a plan is known."""
        self.of.spent(work)


@dataclass(frozen=True)
class Converted:
    """Offers plans to another incumbent, each converted from one of a changed step to one of the step itself.

    Args:
        of: the other incumbent.
        convert: makes of an offered plan one of the step itself.
    """

    of: Anytime
    convert: Callable[[Plan], Plan]

    def offer(self, plan: Plan) -> None:
        """Takes note of a whole plan, so that it is returned if the search ends early."""
        self.of.offer(self.convert(plan))

    def checkpoint(self) -> None:
        """Raises `SearchEndedError` where the time is up and a plan is known."""
        self.of.checkpoint()

    def spent(self, work: int) -> None:
        """Raises `SearchEndedError` where ``work`` reaches the budget of work units and a plan is known."""
        self.of.spent(work)
