"""The passes of causal attention in halves of the tokens, see `autopar.lower.localize.halves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from autopar._compat.dtypes import jax_dtype
from autopar.lower.localize.attention_passes import Backward, Forward, over_blocks, wide
from autopar.lower.localize.blocks import Core
from autopar.lower.localize.halves import Halves, Pair, Unit, picked, picked_core, put
from autopar.lower.not_before import not_before


def forward_in_halves(core: Core) -> list[Any]:
    """The result, and the logarithms of the sums of exponentials.

    Args:
        core: the forward operator on one device.
    """
    spec, halves = core.spec, Halves(core)
    dealt = halves.operands()
    cores = halves.cores(dealt)
    at = [k.index(spec.rows) for k in spec.results]
    shapes = [_half(core.context.result_shape(n), at[n]) for n in (1, 0)]
    states: Pair = tuple(Forward(c).start(*shapes) for c in cores)
    travelling = _travelling(core, dealt)
    for step in range(core.devices):
        here = _split(core, travelling)
        if step < core.devices - 1:
            travelling = core.passed_on(travelling)
        for unit in halves.units(step):
            earlier = halves.earlier(step)
            rows, keys, first = _of_unit(halves, cores, here, unit, step)
            state, _ = over_blocks(rows, Forward(rows).block(keys, first), picked(states, unit[0], earlier))
            states = put(states, unit[0], state, earlier)
        travelling = [not_before(a, states[1][2]) for a in travelling]
    ends = zip(*(Forward(c).finished(s) for c, s in zip(cores, states, strict=True)), strict=True)
    return [halves.brought_back(pair, dim) for pair, dim in zip(ends, at, strict=True)]


def backward_in_halves(core: Core) -> list[Any]:
    """The gradients of queries, keys and values, as far as they are asked for.

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
    travelling = _travelling(core, dealt)
    for step in range(core.devices):
        here = _split(core, travelling)
        if step < core.devices - 1:
            travelling = core.passed_on(travelling)
        for unit in halves.units(step):
            earlier = halves.earlier(step)
            rows, keys, first = _of_unit(halves, cores, here, unit, step)
            back = Backward(rows)
            run = back.block(keys, first, picked(along, unit[0], earlier), list(sums))
            new, stacked = over_blocks(rows, run, picked(of_queries, unit[0], earlier))
            of_queries = put(of_queries, unit[0], new, earlier)
            for which, blocks in zip(sums, stacked, strict=True):
                so_far = picked(sums[which], unit[1], earlier)
                sums[which] = put(sums[which], unit[1], so_far + back.joined(blocks, which), earlier)
        now = (*of_queries[1], *(pair[0] for pair in sums.values()))[0]
        travelling = [not_before(a, now) for a in travelling]
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
    """What the device before had of the gradients of keys and values."""
    sent = core.passed_on([jnp.concatenate(pair, at[w]) for w, pair in sums.items()])
    return {w: (a, b) for w, array in zip(sums, sent, strict=True) for a, b in [jnp.split(array, 2, at[w])]}


def _of_unit(
    halves: Halves, cores: tuple[Core, Core], here: Sequence[Pair], unit: Unit, step: int
) -> tuple[Core, list[Any], Any]:
    """Rows, keys and values of one product of halves, and the number of its first block of keys among all."""
    earlier = halves.earlier(step)
    rows = picked_core(cores, unit[0], earlier)
    number = picked(halves.key_numbers(step), unit[1], earlier)
    return rows, [picked(pair, unit[1], earlier) for pair in here], number * jnp.int32(rows.blocks)
