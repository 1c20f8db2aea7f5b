"""Seconds of a product in blocks next to the messages of its operand or of its sums."""

from __future__ import annotations


def collective_matmul_s(blocks: int, block_s: float, message_s: float, *, overlaps: bool) -> float:
    """Seconds of a product in ``blocks`` blocks with a message between each two of them:

        b + (n - 1) max(b, m)        n b + (n - 1) m where devices do not compute while they send

    The first block is there, or begins the sum; each other one waits for its message, or its message for it (Wang et
    al., ASPLOS'23, section 4).

    Args:
        blocks: n, the devices among which blocks travel.
        block_s: b, seconds of the product of one block.
        message_s: m, seconds in which a block travels by one place.
        overlaps: whether devices compute while they send.
    """
    each_s = max(block_s, message_s) if overlaps else block_s + message_s
    return block_s + (blocks - 1) * each_s
