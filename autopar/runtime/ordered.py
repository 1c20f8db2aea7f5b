"""`OrderedCalls`: programs that make the order of their passes while they run, and can follow one that was."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from autopar.errors import ScheduleError
from autopar.schedule import Table


class OrderedCalls(abc.ABC):
    """A loaded program whose calls have orders, in this process or on workers."""

    @property
    @abc.abstractmethod
    def orders(self) -> Sequence[Table]:
        """The order of the last call; nothing before the first."""

    @abc.abstractmethod
    def replay(self, placed: Sequence[Any], order: Table) -> Sequence[Any]:
        """Runs a call in an order that happened: the same numbers to the bit.

        Args:
            placed: inputs as `place_all` made them.
            order: of an earlier call.

        Raises:
            ScheduleError: the order is of other numbers, or cannot be.
        """


def check_order(order: Table, stages: int, microbatches: int) -> None:
    """Raises ScheduleError where an order is not of so many stages and microbatches."""
    if (order.num_stages, order.num_microbatches) != (stages, microbatches):
        raise ScheduleError(
            f"the order is of {order.num_stages} stages and {order.num_microbatches} microbatches; the step has "
            f"{stages} and {microbatches}"
        )
