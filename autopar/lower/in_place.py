"""Loops that write stacks where they lie: each trip takes its slice of a stack and puts there what replaces it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir import Graph, Layout, Operator
from autopar.ir.layer_loops import of_segments, replaced_in_place
from autopar.ir.loops import Scan


def numbers_in_place(
    graph: Graph, op: Operator, layouts: Sequence[Layout], results: Sequence[Layout], away: Collection[int]
) -> dict[int, int]:
    """Stacks that a loop over layers writes in place: by number of the operand the number of the result.

    Args:
        graph: the step.
        op: a loop of it.
        layouts: of its operands.
        results: of its results.
        away: numbers of operands in host memory.
    """
    scan = Scan.of(op)
    return {
        i - scan.num_whole: j - scan.num_carry
        for i, j in replaced_in_place(graph, op).items()
        if i >= scan.num_whole and i not in away and layouts[i] == results[j] and not layouts[i].dims[0]
    }


def scan_in_place(
    body: Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]],
    initial: Sequence[Any],
    stacks: Sequence[Any],
    pairs: Mapping[int, int],
    *,
    drops_barriers: bool,
    **options: Any,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The results of ``lax.scan`` of ``body``, with some stacks carried on, which compilers write in place.

    Args:
        body: of (carries, slices), gives (carries, slices of results).
        initial: carries.
        stacks: taken in slices.
        pairs: by number of a stack the number of the stack among the results that replaces it.
        drops_barriers: whether the compiler is XLA's for CPU.
        options: of ``lax.scan``: ``length``, ``reverse`` and ``unroll``.
    """
    if not pairs:
        carry, ys = lax.scan(body, initial, stacks, **options)
        return carry, ys
    fixed = [s for n, s in enumerate(stacks) if n not in pairs]
    replacing = set(pairs.values())

    def trip(carry: Any, row: Any) -> tuple[Any, list[Any]]:
        before, written = carry
        number, given = row
        slices, whole = iter(given), dict(zip(pairs, written, strict=True))
        taken = [
            lax.dynamic_index_in_dim(whole[n], number, keepdims=False) if n in whole else next(slices)
            for n in range(len(stacks))
        ]
        after, rows = body(before, taken)
        after, new = _after_all(list(after), [rows[n] for n in pairs.values()], number, drops_barriers)
        put = [lax.dynamic_update_index_in_dim(s, row, number, 0) for s, row in zip(written, new, strict=True)]
        return (after, put), [row for n, row in enumerate(rows) if n not in replacing]

    numbers = jnp.arange(options["length"], dtype=jnp.int32)
    (carry, written), rest = lax.scan(trip, (initial, [stacks[n] for n in pairs]), (numbers, fixed), **options)
    others, results = iter(rest), dict(zip(pairs.values(), written, strict=True))
    return carry, [results[n] if n in results else next(others) for n in range(len(results) + len(rest))]


def ends_layer(op: Operator) -> bool:
    """Whether an operator is the barrier after which a layer of a segment writes its rows of stacks."""
    return op.primitive == "optimization_barrier" and of_segments(op)


def after_layer(graph: Graph, op: Operator, arrays: Sequence[Any]) -> list[Any]:
    """The value after a barrier, for compilers that drop barriers.

    Args:
        graph: body of the loop.
        op: the barrier: of the number of the layer, what the loop carries on, and the rows.
        arrays: its operands.
    """
    carried = {o.operand for o in graph.outputs}
    rows = [n for n, v in enumerate(op.results) if n and v.name not in carried]
    carry = [a for n, a in enumerate(arrays) if n and n not in rows]
    _, new = _after_all(carry, [arrays[n] for n in rows], arrays[0], True)
    given = dict(zip(rows, new, strict=True))
    return [given.get(n, a) for n, a in enumerate(arrays)]


def _after_all(carry: list[Any], rows: list[Any], number: Any, drops_barriers: bool) -> tuple[list[Any], list[Any]]:
    """Carries and slices, none there before the others: what a trip reads of a stack it has read before it writes.

    XLA would keep a copy of the whole stack for a reader that may come after the write. Its compiler for CPU drops
    barriers and computes slices again in each fusion that reads them: what a branch gives it does not.
    """
    if not drops_barriers:
        after, new = lax.optimization_barrier((carry, rows))
        return after, new
    always = number >= 0
    for array in carry:
        if jnp.issubdtype(array.dtype, jnp.inexact) and array.size:
            element = lax.squeeze(lax.slice(array, (0,) * array.ndim, (1,) * array.ndim), range(array.ndim))
            always = always | (element != element)
    return carry, lax.cond(always, lambda new: new, lambda new: [jnp.zeros_like(row) for row in new], rows)
