"""Workers taken in turn, each as far as it comes: how everything that reads rows or instruction lists walks them.

As no task and no instruction chooses, what comes out does not depend on the order in which workers are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def run_round_robin(
    lists: Sequence[Sequence[Item]], at: list[int], carry_out: Callable[[int, Item], bool]
) -> tuple[int, ...]:
    """Carries out items until no worker comes further.

    Args:
        lists: what each worker has to do, in order.
        at: how many each has carried out; counted on in place, so that ``carry_out`` can tell where it is.
        carry_out: (worker, its next item) -> whether it was carried out; False where it must wait for another worker.

    Returns:
        The workers that wait for ever; none where all lists came to their end.
    """
    moved = True
    while moved:
        moved = False
        for worker, line in enumerate(lists):
            while at[worker] < len(line) and carry_out(worker, line[at[worker]]):
                at[worker] += 1
                moved = True
    return tuple(worker for worker, line in enumerate(lists) if at[worker] < len(line))
