"""Products in blocks next to the messages that bring operands or take sums on, inside ``jax.shard_map``.

Half of the blocks travel each way around the ring: on TPUs each direction is a link of its own, and the compiler puts
messages next to products. XLA's compiler for GPUs joins products of one operand into one, which is ready when all
messages are there, or puts all messages first; there blocks travel one way, in steps: one product and one message, and
the next step waits for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.ir import Operator
from autopar.lower.localize.base import LocalContext, permuted
from autopar.lower.values import Unmade
from autopar.sharding.collective_matmul import OPERANDS, CollectiveMatmul, gathered_matmul, scattered_matmul
from autopar.sharding.reshard import ReshardStep

#: Multiplies a block of the left with one of the right.
Product: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Ring:
    """The ring of devices around which blocks of a collective matmul go.

    Args:
        axes: mesh axes, in mesh order.
        context: where shards lie.
        in_steps: one product and one message at a time, all blocks one way; else half of them each way.
    """

    axes: tuple[str, ...]
    context: LocalContext
    in_steps: bool = False

    @property
    def reach(self) -> dict[int, int]:
        """Number of devices that send blocks to this one, by direction: 1 or -1 along the ring."""
        ahead = self.size - 1 if self.in_steps else self.size // 2
        return {1: ahead, -1: self.size - 1 - ahead}

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.context.sizes[a] for a in self.axes)

    def at(self, offset: int) -> Any:
        """Number of the device ``offset`` places on: a traced int32 scalar."""
        return lax.rem(self.context.index(self.axes) + jnp.int32(offset % self.size), jnp.int32(self.size))

    def passed(self, block: Any, by: int) -> Any:
        """The value of the device that is ``by`` places further."""
        pairs = [((n + by) % self.size, n) for n in range(self.size)]
        return self.context.send(lambda b: permuted(b, self.axes, pairs, self.context.index), block)


def gathered_product(how: CollectiveMatmul, ring: Ring, block: Any, other: Any, product: Product) -> tuple[Any, Any]:
    """A product as a collective matmul, and the gathered operand.

    Blocks of the operand go around the ring while the device multiplies the block that it has (Wang et al., ASPLOS'23).

    Args:
        how: the dims of the product that blocks are cut along.
        ring: the devices.
        block: this device's block of the operand.
        other: the other operand.
        product: multiplies blocks; blocks that are summed are multiplied in at least float32.
    """
    operand, size = OPERANDS.index(how.travels), block.shape[how.dim]
    whole = lax.empty(_longer(block.shape, how.dim, ring.size), block.dtype)
    result, here = None, {1: block}
    for k in range(ring.reach[1] + 1):
        arriving = {way: ring.passed(here.get(way, block), way) for way, reach in ring.reach.items() if k < reach}
        for way, arrived in here.items():
            at = ring.at(k * way)
            whole = lax.dynamic_update_slice_in_dim(whole, arrived, at * size, how.dim)
            factor = _sliced(how, ring, (other, other), at)[1 - operand]
            part = product(arrived, factor) if operand == 0 else product(factor, arrived)
            result = _joined(how, ring, result, part, at)
        here = arriving
        if ring.in_steps and arriving:
            here, result = lax.optimization_barrier((arriving, result))
    return result, whole


def _joined(how: CollectiveMatmul, ring: Ring, result: Any, part: Any, at: Any) -> Any:
    """The product so far with that of block ``at``: added, or in its place."""
    if how.result_dim < 0:
        return part if result is None else result + part
    if result is None:
        result = lax.empty(_longer(part.shape, how.result_dim, ring.size), part.dtype)
    return lax.dynamic_update_slice_in_dim(result, part, at * part.shape[how.result_dim], how.result_dim)


def scattered_product(how: CollectiveMatmul, ring: Ring, lhs: Any, rhs: Any, product: Product) -> Any:
    """This device's block of a product that is summed over all devices, as a collective matmul.

    Args:
        how: the dims of the product that blocks are cut along.
        ring: the devices.
        lhs: left operand; its products are terms of the sum.
        rhs: right operand.
        product: multiplies blocks.
    """
    sums: dict[int, Any] = {}
    for k in range(ring.reach[1], 0, -1):
        offsets = {way: k * way for way, reach in ring.reach.items() if k <= reach}
        parts = {way: product(*_sliced(how, ring, (lhs, rhs), ring.at(n))) for way, n in offsets.items()}
        if ring.in_steps:
            lhs, parts, sums = lax.optimization_barrier((lhs, parts, sums))
        sums = {way: ring.passed(sums[way] + part if way in sums else part, -way) for way, part in parts.items()}
    mine = product(*_sliced(how, ring, (lhs, rhs), ring.at(0)))
    return functools.reduce(lambda total, part: total + part, sums.values(), mine)


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
    """A product of a plan that may run as a collective matmul.

    Args:
        op: the product.
        context: where shards lie.
        names: axes of the mesh.
        apply: multiplies shards or blocks of them, into the dtype that is given, or that of the result.
        in_steps: one product and one message at a time, all blocks one way; else half of them each way.
        result: of `gathered`, once the operand has been taken.
    """

    op: Operator
    context: LocalContext
    names: Sequence[str]
    apply: Callable[..., Any]
    in_steps: bool = False
    result: Any = None

    def gathered(self, operand: int, other: Any) -> Callable[[ReshardStep, Any], Any]:
        """A function that runs the gather of an operand and the product as one collective matmul.

        It takes the gather and the operand's block, and returns the gathered operand, or None where they cannot be one.

        Args:
            operand: number of the operand that is gathered.
            other: the other operand.
        """

        def instead(step: ReshardStep, block: Any) -> Any:
            how = gathered_matmul(self.op, self._ranks, operand, step, self.names)
            if how is None or not block.size:
                return None
            wide = how.result_dim < 0 and _is_narrow(self._dtype)
            product = functools.partial(self.apply, dtype=jnp.dtype("float32")) if wide else self.apply
            result, whole = gathered_product(how, Ring(how.axes, self.context, self.in_steps), block, other, product)
            self.result = result.astype(self._dtype)
            return whole

        return instead

    def unmade(self, lhs: Any, rhs: Any) -> Unmade:
        """The product of two operands, computed when it is read: with a reduce-scatter as a collective matmul."""

        def scattered(step: ReshardStep) -> Any:
            how = scattered_matmul(self.op, self._ranks, step, self.names)
            if how is None or not lhs.size or not rhs.size:
                return None
            return scattered_product(how, Ring(how.axes, self.context, self.in_steps), lhs, rhs, self.apply)

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
