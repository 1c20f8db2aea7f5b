"""Seconds of products in blocks, against sums by hand and simulated rings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import collective_matmul_s
from autopar.search.intra.overlap import TimedTask, Transfer, list_schedule


@pytest.mark.parametrize(
    ("blocks", "block_s", "message_s", "seconds", "in_turn"),
    [
        (1, 3.0, 9.0, 3.0, 3.0),
        (2, 3.0, 1.0, 6.0, 7.0),  # messages are hidden
        (2, 1.0, 3.0, 4.0, 5.0),  # a block is hidden
        (4, 2.0, 2.0, 8.0, 14.0),
        (8, 1.0, 5.0, 36.0, 43.0),
    ],
)
def test_by_hand(blocks: int, block_s: float, message_s: float, seconds: float, in_turn: float) -> None:
    assert collective_matmul_s(blocks, block_s, message_s, overlaps=True) == seconds
    assert collective_matmul_s(blocks, block_s, message_s, overlaps=False) == in_turn


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 50), st.integers(0, 50))
def test_as_a_schedule_of_blocks_and_messages(blocks: int, block_s: int, message_s: int) -> None:
    """Of an operand that is there at the start, and of sums that go to a reader, nothing else to compute or send."""
    tasks = [TimedTask(f"{n}", float(block_s), (f"{n - 1}",) if n else ()) for n in range(blocks)]
    arriving = [Transfer("", f"{n}", "intra", float(message_s)) for n in range(1, blocks)]
    sums = [Transfer(f"{n - 1}", "reader", "intra", float(message_s)) for n in range(1, blocks)]
    seconds = collective_matmul_s(blocks, block_s, message_s, overlaps=True)
    assert list_schedule(tasks, arriving).seconds == seconds
    scattered = list_schedule([*tasks, TimedTask("reader", 0.0, (f"{blocks - 1}",))], sums)
    assert scattered.seconds == seconds
