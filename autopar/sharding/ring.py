"""`Travel` and `RingExchange`: shards of an operand that go once around the devices that split a loop.

Each of n devices has its own shard; in n - 1 messages it sees those of all others. What is added up on the way, as
gradients of these shards, takes n messages, after which it is at home. In all (n - 1) or n times the bytes of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Travel:
    """An operand whose shards go once around a ring of devices while an operator runs, as keys in ring attention.

    Args:
        operand: index of the operand.
        dim: the dim of the operand that is split over the ring.
        returns: whether shards go back to their owners, one message more, as accumulated gradients do.
        width: bytes of an element on the way; 0 for those of the operand.
    """

    operand: int
    dim: int
    returns: bool = False
    width: int = 0


@dataclass(frozen=True, slots=True, order=True)
class RingExchange:
    """A `Travel` on given mesh axes: shards of one operand that go around the ring of devices of these axes.

    Args:
        operand: index of the operand.
        dim: the dim of the operand that is split over the ring.
        axes: mesh axes of the ring, major first.
        count: messages that each device sends.
        width: bytes of an element on the way; 0 for those of the operand.
    """

    operand: int
    dim: int
    axes: tuple[str, ...]
    count: int
    width: int = 0

    @staticmethod
    def of(travel: Travel, axes: tuple[str, ...], sizes: Mapping[str, int]) -> RingExchange:
        """The exchange of ``travel`` among the devices of ``axes``.

        Args:
            travel: which operand goes around, and whether it returns.
            axes: mesh axes of the ring, major first.
            sizes: devices along each axis.
        """
        devices = 1
        for axis in axes:
            devices *= sizes[axis]
        return RingExchange(travel.operand, travel.dim, axes, devices if travel.returns else devices - 1, travel.width)
