"""Products in blocks next to the messages that bring operands or take sums on, inside ``jax.shard_map``.

Blocks travel both ways around the ring, half of them each way, so that both directions of its links carry some.
Messages are written down before the product that they run next to; nothing that a block computes is needed for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Operator
from autopar.lower.localize.base import LocalContext, axis_names
from autopar.lower.values import Unmade
from autopar.sharding.collective_matmul import OPERANDS, CollectiveMatmul, gathered_matmul, scattered_matmul
from autopar.sharding.reshard import ReshardStep

#: Multiplies a block of the left with one of the right.
Product: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Ring:
    """The devices among which blocks travel.

    Args:
        axes: mesh axes, in mesh order.
        context: where shards lie.
    """

    axes: tuple[str, ...]
    context: LocalContext

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.context.sizes[a] for a in self.axes)

    def at(self, offset: int) -> Any:
        """Number of the device ``offset`` places on: a traced int32 scalar."""
        return lax.rem(self.context.index(self.axes) + jnp.int32(offset % self.size), jnp.int32(self.size))

    def passed(self, block: Any, by: int) -> Any:
        """What the device ``by`` places on has."""
        names = axis_names(self.context.index, self.axes)
        pairs = [((n + by) % self.size, n) for n in range(self.size)]
        return self.context.send(lambda b: lax.ppermute(b, names, pairs), block)


def gathered_product(how: CollectiveMatmul, ring: Ring, block: Any, other: Any, product: Product) -> tuple[Any, Any]:
    """A product, and the operand that would have been gathered for it.

    Args:
        how: the form.
        ring: the devices.
        block: this device's block of the operand.
        other: the other operand.
        product: multiplies blocks; of blocks that are added up in at least float32.
    """
    operand, size = OPERANDS.index(how.travels), block.shape[how.dim]
    whole = jnp.zeros(_longer(block.shape, how.dim, ring.size), block.dtype)
    result = None
    for offset, arrived in _arriving(ring, block):
        at = ring.at(offset)
        whole = lax.dynamic_update_slice_in_dim(whole, arrived, at * size, how.dim)
        factor = _sliced(how, ring, (other, other), at)[1 - operand]
        part = product(arrived, factor) if operand == 0 else product(factor, arrived)
        if how.result_dim < 0:
            result = part if result is None else result + part
            continue
        if result is None:
            result = jnp.zeros(_longer(part.shape, how.result_dim, ring.size), part.dtype)
        result = lax.dynamic_update_slice_in_dim(result, part, at * part.shape[how.result_dim], how.result_dim)
    return result, whole


def scattered_product(how: CollectiveMatmul, ring: Ring, lhs: Any, rhs: Any, product: Product) -> Any:
    """This device's block of the sum over all devices of a product.

    Args:
        how: the form.
        ring: the devices.
        lhs: left operand; its products are terms of the sum.
        rhs: right operand.
        product: multiplies blocks.
    """

    def block(offset: int) -> Any:
        return product(*_sliced(how, ring, (lhs, rhs), ring.at(offset)))

    def added(total: Any, part: Any) -> Any:
        return part if total is None else total + part

    ahead = behind = None
    for k in range(ring.size // 2, 0, -1):
        ahead = ring.passed(added(ahead, block(k)), -1)
        if k <= (ring.size - 1) // 2:
            behind = ring.passed(added(behind, block(-k)), 1)
    mine = added(ahead, block(0))
    return mine if behind is None else mine + behind


def _arriving(ring: Ring, block: Any) -> Iterator[tuple[int, Any]]:
    """(offset, block of the device so many places on), its own first; the next are on their way when one is given."""
    ahead = behind = block
    arrived: list[tuple[int, Any]] = [(0, block)]
    for k in range(1, ring.size // 2 + 1):
        ahead = ring.passed(ahead, 1)
        on_the_way = [(k, ahead)]
        if k <= (ring.size - 1) // 2:
            behind = ring.passed(behind, -1)
            on_the_way.append((-k, behind))
        yield from arrived
        arrived = on_the_way
    yield from arrived


def _sliced(how: CollectiveMatmul, ring: Ring, operands: tuple[Any, Any], at: Any) -> list[Any]:
    """The operands, with the slices of them that belong to block ``at``."""
    taken = list(operands)
    for n, dim in how.sliced:
        size = taken[n].shape[dim] // ring.size
        taken[n] = lax.dynamic_slice_in_dim(taken[n], at * size, size, dim)
    return taken


def _longer(shape: tuple[int, ...], dim: int, times: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


@dataclass
class BlockProduct:
    """A product of a plan that may run in blocks.

    Args:
        op: the product.
        context: where shards lie.
        names: axes of the mesh.
        apply: multiplies shards or blocks of them, into the dtype that is given, or that of the result.
        result: of `gathered`, once the operand has been taken.
    """

    op: Operator
    context: LocalContext
    names: Sequence[str]
    apply: Callable[..., Any]
    result: Any = None

    def gathered(self, operand: int, other: Any) -> Callable[[ReshardStep, Any], Any]:
        """What does the last step before the product, and the product next to it: `Instead` of a value.

        Args:
            operand: number of the operand that is taken.
            other: the other one.
        """

        def instead(step: ReshardStep, block: Any) -> Any:
            how = gathered_matmul(self.op, self._ranks, operand, step, self.names)
            if how is None or not block.size:
                return None
            wide = how.result_dim < 0 and _is_narrow(self._dtype)
            product = functools.partial(self.apply, dtype=jnp.dtype("float32")) if wide else self.apply
            result, whole = gathered_product(how, Ring(how.axes, self.context), block, other, product)
            self.result = result.astype(self._dtype)
            return whole

        return instead

    def unmade(self, lhs: Any, rhs: Any) -> Unmade:
        """The product of two operands, made when it is read."""

        def scattered(step: ReshardStep) -> Any:
            how = scattered_matmul(self.op, self._ranks, step, self.names)
            if how is None or not lhs.size or not rhs.size:
                return None
            return scattered_product(how, Ring(how.axes, self.context), lhs, rhs, self.apply)

        return Unmade(lambda: self.apply(lhs, rhs), scattered)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(t.rank for t in self.context.operand_types)

    @property
    def _dtype(self) -> Any:
        return numpy_dtype(self.context.result_types[0].dtype)


def _is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether sums of a dtype are better made in float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4
