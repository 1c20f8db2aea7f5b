"""Price of a pipeline's step by both ways in which several processes carry it out: `priced`.

    lists         step = predicted step + start x starts of the worker that has the most
    one program   step = start + sum over rounds of (branch + slowest worker + slowest message of each permute)

One program starts once, and every worker waits for the slowest of each round. A permute joins all workers and takes as
long as its longest message. Slot k is as long as the k-th longest value that any worker has in any round, so a device
holds the values of the fullest worker and what other workers' longer values add.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.constants import StartPrices
from autopar.plan.pipeline import ExecutionPrice, ExecutionPrices


@dataclass(frozen=True)
class RoundWork:
    """Work of one program in a round.

    Args:
        busy_s: seconds of the program of each worker; 0 where it has none.
        permutes_s: by permute after the round the seconds of its messages.
        held_bytes: by worker bytes of each value that it holds when the round ends.
    """

    busy_s: tuple[float, ...]
    permutes_s: tuple[tuple[float, ...], ...]
    held_bytes: tuple[tuple[int, ...], ...]


def priced(
    step_s: float, peak_bytes: int, starts: Sequence[int], rounds: Sequence[RoundWork], prices: StartPrices
) -> ExecutionPrices:
    """Price of both ways.

    Args:
        step_s: predicted seconds of the lists without starts.
        peak_bytes: predicted bytes of the fullest device by lists.
        starts: by worker how many programs and sends the host starts.
        rounds: of one program.
        prices: of starting.
    """
    seconds = prices.start_s
    for each in rounds:
        seconds += prices.branch_s + max(each.busy_s) + sum(max(permute) for permute in each.permutes_s)
    fullest = max((sum(worker) for each in rounds for worker in each.held_bytes), default=0)
    longer = max(0, slot_bytes(rounds) - fullest)
    return ExecutionPrices(
        lists=ExecutionPrice(step_s + prices.start_s * max(starts), peak_bytes),
        one_program=ExecutionPrice(seconds, peak_bytes + longer),
        rounds=len(rounds),
        permutes=sum(len(each.permutes_s) for each in rounds),
    )


def slot_bytes(rounds: Sequence[RoundWork]) -> int:
    """Bytes of the slots of one program, which are the same on every device."""
    held = [sorted(worker, reverse=True) for each in rounds for worker in each.held_bytes]
    return sum(max(sizes) for sizes in itertools.zip_longest(*held, fillvalue=0))
