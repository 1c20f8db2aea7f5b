"""`OverlapPolicy`: thresholds of what runs next to computation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapPolicy:
    """Iterations in which a sharding is solved again with hidden communication, on devices that send next to computing.

    Args:
        link_shares: for each answer beyond the first the share of its seconds that a hidden conversion costs still. Of
            eight GPTs none got faster with a share of 0 (up to 3.5 times slower: all use the same idle links), all
            with 0.1 or 0.5, by 0 to 21%; with both in turn by 14% on average, and a third share gained 0.3%.
        stall_share: share of a step that waits for collectives, up to which the answer stays: no more than it can be
            won, and a part of it is. With half as much GPT in two stages takes 17% more work for the same plan.
        most_blocks: blocks of a product that travel next to it: programs grow with them, and blocks become small. It is
            a choice.
        joining_factors: thresholds that are compared, over the bytes that take as long to send as the latency.
        joins_named: whether plans that are named by hand have thresholds of their own: they are compared with published
            runs, which had the compiler's.
    """

    link_shares: tuple[float, ...] = (0.1, 0.5)
    stall_share: float = 0.02
    most_blocks: int = 16
    joining_factors: tuple[int, ...] = (1, 4, 16, 64)
    joins_named: bool = False
