"""Causal attention in halves of the tokens: scores that the mask leaves empty are not made.

Of the tokens in 2n halves of blocks each of n devices takes the i-th and the (2n - 1 - i)-th, so that all have the same
scores to make: of its own keys three quarters, of those of another device half, 2n + 1 products of halves where there
are 4n ("zig-zag"; Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2). Outside tokens lie as the layouts
say: two messages an operand deal its halves out, and two bring those of a result home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopar.lower.localize.base import axis_names
from autopar.lower.localize.blocks import Core

#: What belongs to the earlier half of a device and to the later one.
Pair: TypeAlias = tuple[Any, Any]
#: Numbers of a half of the rows and of the keys of a product; None for what `Halves.earlier` says.
Unit: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Halves:
    """The halves that a device has.

    Args:
        core: an operator of causal attention on one device, with tokens as the layouts say.
    """

    core: Core

    @cached_property
    def me(self) -> Any:
        """Number of the device on the ring."""
        return self.core.context.index(self.core.ring) if self.core.ring else jnp.int32(0)

    def numbers(self, device: Any) -> Pair:
        """Numbers of the two halves of a device, among all."""
        return device, jnp.int32(2 * self.core.devices - 1) - device

    def dealt(self, array: Any, dim: int) -> Pair:
        """The halves that the device takes of an array, from those that lie on it and on others."""
        first, second = jnp.split(array, 2, dim)
        if self.core.devices == 1:
            return first, second
        first, second = (self._sent(a, n, back=False) for n, a in enumerate((first, second)))
        return self._ordered(first, second)

    def brought_back(self, pair: Pair, dim: int) -> Any:
        """An array as the layouts say, from the halves that devices took."""
        if self.core.devices > 1:
            pair = self._ordered(*pair)
            pair = (self._sent(pair[0], 0, back=True), self._sent(pair[1], 1, back=True))
        return jnp.concatenate(pair, dim)

    def _ordered(self, a: Any, b: Any) -> Pair:
        """``a`` and ``b``, the other way round on devices with an odd number."""
        even = lax.rem(self.me, jnp.int32(2)) == 0
        return jnp.where(even, a, b), jnp.where(even, b, a)

    def _sent(self, array: Any, which: int, *, back: bool) -> Any:
        """The first halves that lie on devices, or the second, sent to where they are taken, or ``back``."""
        n = self.core.devices
        names = axis_names(self.core.context.index, self.core.ring)
        moves = [(i, min(2 * i + which, 2 * n - 1 - 2 * i - which)) for i in range(n)]
        pairs = [(b, a) if back else (a, b) for a, b in moves]
        return self.core.context.send(lambda a: lax.ppermute(a, names, pairs), array)

    def earlier(self, step: int) -> Any:
        """Whether the keys that are here in a step are of a device before this one."""
        return lax.rem(self.me + jnp.int32(self.core.devices - step), jnp.int32(self.core.devices)) < self.me

    def key_numbers(self, step: int) -> Pair:
        """Numbers of the halves of keys that are here in a step."""
        count = jnp.int32(self.core.devices)
        return self.numbers(lax.rem(self.me + count - jnp.int32(step), count))

    def units(self, step: int) -> Iterator[Unit]:
        """The products of halves of a step: those that the mask leaves something of."""
        if step == 0:
            yield from ((0, 0), (1, 0), (1, 1))
        else:
            yield from ((1, 0), (None, None))

    def cores(self, dealt: Sequence[Pair]) -> tuple[Core, Core]:
        """The operator on each half of the rows.

        Args:
            dealt: the halves of each operand, or the same twice.
        """
        first, second = self.numbers(self.me)
        return (
            replace(self.core, operands=[a for a, _ in dealt], part=first),
            replace(self.core, operands=[b for _, b in dealt], part=second),
        )

    def operands(self, without: Sequence[int] = ()) -> list[Pair]:
        """The halves of each operand, those of keys and values along the keys; what has no rows is whole in both.

        Args:
            without: operands that nobody reads.
        """
        spec, pairs = self.core.spec, list[Pair]()
        for n, (array, labels) in enumerate(zip(self.core.operands, spec.operands, strict=True)):
            loop = spec.keys if n in (1, 2) else spec.rows
            if loop not in labels or n in without:
                pairs.append((array, array))
            else:
                pairs.append(self.dealt(array, labels.index(loop)))
        return pairs


def picked(pair: Pair, which: int | None, earlier: Any) -> Any:
    """One of two trees of arrays; the first where ``which`` is None and ``earlier`` holds."""
    if which is not None:
        return pair[which]
    return jax.tree.map(lambda a, b: jnp.where(earlier, a, b), *pair)


def put(pair: Pair, which: int | None, new: Any, earlier: Any) -> Pair:
    """A pair with another one of its two; see `picked`."""
    if which is not None:
        return (new, pair[1]) if which == 0 else (pair[0], new)
    return picked((new, pair[0]), None, earlier), picked((pair[1], new), None, earlier)


def picked_core(cores: tuple[Core, Core], which: int | None, earlier: Any) -> Core:
    """One of two cores; see `picked`."""
    if which is not None:
        return cores[which]
    a, b = cores
    operands = [x if x is y else jnp.where(earlier, x, y) for x, y in zip(a.operands, b.operands, strict=True)]
    return replace(a, operands=operands, part=jnp.where(earlier, a.part, b.part))
