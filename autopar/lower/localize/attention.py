"""Localizers of attention in blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.dtypes import jax_dtype
from autopar.ir.blockwise import ATTENTION, BACKWARD
from autopar.lower.barriers import not_before
from autopar.lower.localize.attention_passes import Backward, Forward, Ring, over_blocks, wide
from autopar.lower.localize.base import LocalContext, Localizer, permuted
from autopar.lower.localize.blocks import Core


def attention(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Attention of this device's tokens to all keys."""
    core = Core(params, operands, context)
    return forward_in_halves(core) if context.skips_masked else Forward(core).run()


def attention_backward(
    primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext
) -> list[Any]:
    """Gradients of this device's queries, keys and values."""
    core = Core(params, operands, context)
    return backward_in_halves(core) if context.skips_masked else Backward(core).run()


LOCALIZERS: Mapping[str, Localizer] = MappingProxyType({ATTENTION: attention, BACKWARD: attention_backward})


def forward_in_halves(core: Core) -> list[Any]:
    """Causal attention on two halves of the rows that a device takes: the result, and the softmax's log-sum-exp.

    Args:
        core: the forward operator on one device.
    """
    spec, halves = core.spec, Halves(core)
    dealt = halves.operands()
    cores = halves.cores(dealt)
    at = [k.index(spec.rows) for k in spec.results]
    shapes = [_half(core.context.result_shape(n), at[n]) for n in (1, 0)]
    states: Pair = tuple(Forward(c).start(*shapes) for c in cores)
    ring = Ring(core, _travelling(core, dealt))
    for step, here in ring.steps():
        for unit, earlier, rows, keys, first in _products(halves, cores, here, step):
            state, _ = over_blocks(rows, Forward(rows).block(keys, first), picked(states, unit[0], earlier))
            states = put(states, unit[0], state, earlier)
        ring.hold(states[1][2])
    ends = zip(*(Forward(c).finished(s) for c, s in zip(cores, states, strict=True)), strict=True)
    return [halves.brought_back(pair, dim) for pair, dim in zip(ends, at, strict=True)]


def backward_in_halves(core: Core) -> list[Any]:
    """Backward pass of causal attention on two halves of the rows: gradients of queries, keys and values as asked for.

    Args:
        core: the backward operator on one device.
    """
    spec, halves = core.spec, Halves(core)
    along = halves.dealt(Backward(core).along(), spec.sums.index(spec.rows))
    # Else a compiler takes what came by in the forward pass, and keeps all keys from there to here.
    late = [not_before(a, core.operands[5]) if n < 3 else a for n, a in enumerate(core.operands)]
    halves = Halves(replace(core, operands=late))
    dealt = halves.operands(without=(3,))
    cores = halves.cores(dealt)
    dtypes = [jax_dtype(t.dtype) for t in core.context.result_types]
    whole = {w: core.context.result_shape(n) for n, w in enumerate(spec.gradients)}
    at = {w: k.index(spec.keys if w else spec.rows) for w, k in zip(spec.gradients, spec.results, strict=True)}
    zeros = {w: jnp.zeros(_half(whole[w], at[w]), wide(dtypes[n])) for n, w in enumerate(spec.gradients)}
    of_queries: Pair = ([zeros[0]], [zeros[0]]) if 0 in zeros else ([], [])
    sums = {w: (a, a) for w, a in zeros.items() if w}
    ring = Ring(core, _travelling(core, dealt))
    for step, here in ring.steps():
        for unit, earlier, rows, keys, first in _products(halves, cores, here, step):
            back = Backward(rows)
            run = back.block(keys, first, picked(along, unit[0], earlier), list(sums))
            new, stacked = over_blocks(rows, run, picked(of_queries, unit[0], earlier))
            of_queries = put(of_queries, unit[0], new, earlier)
            for which, blocks in zip(sums, stacked, strict=True):
                so_far = picked(sums[which], unit[1], earlier)
                sums[which] = put(sums[which], unit[1], so_far + back.joined(blocks, which), earlier)
        ring.hold((*of_queries[1], *(pair[0] for pair in sums.values()))[0])
        if core.devices > 1:
            sums = _passed_on(core, sums, at)
    ends = {w: tuple(a.astype(dtypes[n]) for a in _pair(w, of_queries, sums)) for n, w in enumerate(spec.gradients)}
    return [halves.brought_back((a, b), at[w]) for w, (a, b) in ends.items()]


def _pair(which: int, of_queries: Pair, sums: Mapping[int, Pair]) -> Pair:
    return sums[which] if which else (of_queries[0][0], of_queries[1][0])


def _half(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(n // 2 if d == dim else n for d, n in enumerate(shape))


def _travelling(core: Core, dealt: Sequence[Pair]) -> list[Any]:
    """Keys and values, the device's two halves after each other."""
    return [jnp.concatenate(dealt[n], core.spec.operands[n].index(core.spec.keys)) for n in (1, 2)]


def _split(core: Core, arrays: Sequence[Any]) -> list[Pair]:
    """The two halves of keys and of values."""
    spec = core.spec
    return [tuple(jnp.split(a, 2, spec.operands[n].index(spec.keys))) for n, a in enumerate(arrays, 1)]  # type: ignore[misc]


def _passed_on(core: Core, sums: Mapping[int, Pair], at: Mapping[int, int]) -> dict[int, Pair]:
    """Sends sums of gradients of keys and values to the next device; returns those of the previous one."""
    sent = core.passed_on([jnp.concatenate(pair, at[w]) for w, pair in sums.items()])
    return {w: (a, b) for w, array in zip(sums, sent, strict=True) for a, b in [jnp.split(array, 2, at[w])]}


def _products(
    halves: Halves, cores: tuple[Core, Core], here: Sequence[Any], step: int
) -> Iterator[tuple[Unit, Any, Core, list[Any], Any]]:
    """Products of halves in a step: unit, whether the keys are of a device before this one, rows, keys and values, and
    the number of its first block of keys among all."""
    pairs = _split(halves.core, here)
    for unit in halves.units(step):
        earlier = halves.earlier(step)
        rows = picked_core(cores, unit[0], earlier)
        number = picked(halves.key_numbers(step), unit[1], earlier)
        yield unit, earlier, rows, [picked(pair, unit[1], earlier) for pair in pairs], number * jnp.int32(rows.blocks)


#: What belongs to the earlier half of a device and to the later one.
Pair: TypeAlias = tuple[Any, Any]
#: Numbers of a half of the rows and of the keys of a product; None for what `Halves.earlier` says.
Unit: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Halves:
    """Two halves of rows that each device of a causal ring takes, so that masks leave each device as much work.

    Of 2n halves of a sequence device i has the i-th and the i-th from the end.

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
        """The two halves of an array that the device takes, received from the devices that hold them."""
        first, second = jnp.split(array, 2, dim)
        if self.core.devices == 1:
            return first, second
        first, second = (self._sent(a, n, back=False) for n, a in enumerate((first, second)))
        return self._ordered(first, second)

    def brought_back(self, pair: Pair, dim: int) -> Any:
        """An array in the layout of the plan, from the halves that devices took: the reverse of `dealt`."""
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
        n, context = self.core.devices, self.core.context
        moves = [(i, min(2 * i + which, 2 * n - 1 - 2 * i - which)) for i in range(n)]
        pairs = [(b, a) if back else (a, b) for a, b in moves]
        return context.send(lambda a: permuted(a, self.core.ring, pairs, context.index), array)

    def earlier(self, step: int) -> Any:
        """Whether the keys that are here in a step are of a device before this one."""
        return lax.rem(self.me + jnp.int32(self.core.devices - step), jnp.int32(self.core.devices)) < self.me

    def key_numbers(self, step: int) -> Pair:
        """Numbers of the halves of keys that are here in a step."""
        count = jnp.int32(self.core.devices)
        return self.numbers(lax.rem(self.me + count - jnp.int32(step), count))

    def units(self, step: int) -> Iterator[Unit]:
        """Pairs (half of the queries, half of the keys) of a ring's step that a causal mask does not leave out."""
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
    """One of two trees of arrays: number ``which``, or where that is None the first if ``earlier`` is true."""
    if which is not None:
        return pair[which]
    return jax.tree.map(lambda a, b: jnp.where(earlier, a, b), *pair)


def put(pair: Pair, which: int | None, new: Any, earlier: Any) -> Pair:
    """``pair`` with ``new`` in place of number ``which``, or where that is None of the first if ``earlier`` is true."""
    if which is not None:
        return (new, pair[1]) if which == 0 else (pair[0], new)
    return picked((new, pair[0]), None, earlier), picked((pair[1], new), None, earlier)


def picked_core(cores: tuple[Core, Core], which: int | None, earlier: Any) -> Core:
    """One of two operators on a device: number ``which``, or where that is None the first if ``earlier`` is true."""
    if which is not None:
        return cores[which]
    a, b = cores
    operands = [x if x is y else jnp.where(earlier, x, y) for x, y in zip(a.operands, b.operands, strict=True)]
    return replace(a, operands=operands, part=jnp.where(earlier, a.part, b.part))
