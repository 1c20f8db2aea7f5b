"""`Travel` and `RingExchange`: pieces of an operand that go once around the devices that split a loop.

Each of n devices has its own piece; in n - 1 messages it sees those of all others. What is added up on the way, as
gradients of these pieces, takes n messages, after which it is at home. In all (n - 1) or n times the bytes of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Travel:
    """An operand, or what is as large, whose pieces go around.

    Args:
        operand: index of the operand.
        dim: its dim that is split.
        returns: whether it comes home, one message more.
        width: bytes of an element on the way; 0 as the operand has them.
    """

    operand: int
    dim: int
    returns: bool = False
    width: int = 0


@dataclass(frozen=True, slots=True, order=True)
class RingExchange:
    """A travel in a strategy.

    Args:
        operand: index of the operand.
        dim: its dim that is split.
        axes: mesh axes that split it, major first.
        count: messages that each device sends.
        width: bytes of an element on the way; 0 as the operand has them.
    """

    operand: int
    dim: int
    axes: tuple[str, ...]
    count: int
    width: int = 0

    @staticmethod
    def of(travel: Travel, axes: tuple[str, ...], sizes: Mapping[str, int]) -> RingExchange:
        """The exchange of a travel among the devices of ``axes``."""
        devices = 1
        for axis in axes:
            devices *= sizes[axis]
        return RingExchange(travel.operand, travel.dim, axes, devices if travel.returns else devices - 1, travel.width)
