"""Order that a compiler must keep: what is not computed early, and collectives apart from loops with collectives.

`after` and `not_before` make a value depend on others. `CollectiveBarriers` uses them: XLA's CPU client runs what is
independent at the same time, on as many threads as there are devices. It keeps collectives in one order on all
devices, but not those inside of loops and branches: some devices may wait within a branch, others at a collective next
to it, until no thread is left, and the process is ended. So what must not overlap is made to depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import whole_bytes
from autopar.ir import Layout, Operator

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def after(piece: Any, others: Sequence[Any]) -> Any:
    """``piece`` as it is, in a form that a compiler cannot compute before all of ``others`` are there.

    More bits set than there are is never true, which no pass over HLO knows.

    Args:
        piece: an array.
        others: numbers, from `element_of`.
    """
    never = jnp.zeros((), bool)
    for other in others:
        bits = lax.bitcast_convert_type(other, _BITS[other.dtype.itemsize])
        never |= lax.population_count(bits) > 8 * other.dtype.itemsize
    return jnp.where(never, jnp.zeros_like(piece), piece)


def element_of(array: Any) -> Any:
    """One number of an array, in a type of whole bytes; None where it has none."""
    array = jnp.asarray(array)
    if not array.size or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    element = lax.squeeze(lax.slice(array, (0,) * array.ndim, (1,) * array.ndim), range(array.ndim))
    element = element.real if jnp.issubdtype(element.dtype, jnp.complexfloating) else element
    element = element.astype(whole_bytes(element.dtype))
    return element if element.dtype.itemsize in _BITS else None


def not_before(piece: Any, now: Any) -> Any:
    """``piece``, in a form that a compiler cannot compute before ``now`` is there; floats alone wait.

    Forward and backward each gather a parameter for themselves where memory is short. A compiler would see two
    equal gathers, do one of them, early, and keep it. An ``optimization_barrier`` does not stop XLA's CPU compiler,
    which drops barriers first.
    """
    if now is None or not jnp.issubdtype(now.dtype, jnp.inexact) or not jnp.issubdtype(piece.dtype, jnp.floating):
        return piece
    element = element_of(now)
    return piece if element is None else after(piece, [element])


@dataclass
class CollectiveBarriers:
    """Collectives and regions of one graph that are done, in the order of tracing.

    Args:
        regions: how many loops and branches with collectives inside there were.
        last: an element of a result of the last of them; None where there was none.
        since: elements of the results of collectives after that.
    """

    regions: int = 0
    last: Any = None
    since: list[Any] = field(default_factory=list)

    def collective(self, piece: Any, age: int) -> Any:
        """Operand of a collective, after a barrier that waits for the last region.

        Args:
            piece: of this device.
            age: number of the last region that it depends on by itself.
        """
        return piece if age == self.regions or self.last is None else after(piece, [self.last])

    def collected(self, result: Any) -> None:
        """Notes the result of a collective."""
        if (element := element_of(result)) is not None:
            self.since.append(element)

    def enter(self, arrays: Sequence[Any], age: int) -> list[Any]:
        """Operands of a region, of which one waits for all collectives so far and for the last region.

        Args:
            arrays: its operands.
            age: number of the last region that the operands depend on by themselves.
        """
        before = [*self.since, *([] if age == self.regions or self.last is None else [self.last])]
        sizes = {n: a.size for n, a in enumerate(map(jnp.asarray, arrays)) if element_of(a) is not None}
        if not before or not sizes:
            return list(arrays)
        least = min(sizes, key=lambda n: (sizes[n], n))
        return [after(jnp.asarray(a), before) if n == least else a for n, a in enumerate(arrays)]

    def leave(self, results: Sequence[Any]) -> None:
        """Notes the results of a region."""
        elements = [e for r in results if (e := element_of(r)) is not None]
        if elements:
            self.regions, self.last, self.since = self.regions + 1, elements[0], []


def splits_inside(
    operands: Mapping[str, Sequence[Layout | None]], results: Mapping[str, Sequence[Layout]], prefix: str, op: Operator
) -> bool:
    """Whether anything inside the regions of an operator is split.

    Args:
        operands: layouts of operands by operator.
        results: likewise of results.
        prefix: ids of the operator and of what is around it, each followed by ``/``.
        op: the operator.
    """
    for name, region in op.regions:
        for inner in region.operators:
            id = f"{prefix}{name}/{inner.id}"
            layouts = (*operands.get(id, ()), *results.get(id, ()))
            if any(k is not None and not k.is_replicated for k in layouts):
                return True
            if inner.regions and splits_inside(operands, results, f"{id}/", inner):
                return True
    return False
