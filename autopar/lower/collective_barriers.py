"""Keeps collectives of a program apart from loops and branches that have collectives inside.

XLA's CPU client runs what is independent at the same time, on as many threads as there are devices. It keeps
collectives in one order on all devices, but not those inside of loops and branches: some devices may wait within a
branch, others at a collective next to it, until no thread is left, and the process is ended. So what must not
overlap is made to depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from autopar.ir import Layout, Operator
from autopar.lower.not_before import behind, element_of


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
        """Operand of a collective, behind a barrier that waits for the last region.

        Args:
            piece: of this device.
            age: number of the last region that it depends on by itself.
        """
        return piece if age == self.regions or self.last is None else behind(piece, [self.last])

    def collected(self, result: Any) -> None:
        """Notes what a collective made."""
        if (element := element_of(result)) is not None:
            self.since.append(element)

    def enter(self, arrays: Sequence[Any], age: int) -> list[Any]:
        """Operands of a region, of which one waits for all collectives so far and for the last region.

        Args:
            arrays: its operands.
            age: see `collective`.
        """
        before = [*self.since, *([] if age == self.regions or self.last is None else [self.last])]
        sizes = {n: a.size for n, a in enumerate(map(jnp.asarray, arrays)) if element_of(a) is not None}
        if not before or not sizes:
            return list(arrays)
        least = min(sizes, key=lambda n: (sizes[n], n))
        return [behind(jnp.asarray(a), before) if n == least else a for n, a in enumerate(arrays)]

    def leave(self, results: Sequence[Any]) -> None:
        """Notes what a region made."""
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
