"""`placed_experts`: experts lie in an order that measured loads decide, and that changes between steps.

Where a plan splits the experts each device has as many of them as the others, those that lie next to each other. Which
these are the program decides, and one device may have all that are asked for. Here a placement does: the parameters of
experts lie in its order, tokens are sent to where they lie, and results are those of the plain step to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.transforms.parameters import leaf_paths
from autopar.transforms.permuted import PermutedRun, Stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedState:
    """A state whose experts lie in an order.

    Args:
        state: as the plain step has it, experts in the order.
        order: for each place the number of the expert that lies there: [experts], int32.
    """

    state: Any
    order: Any


@dataclass(frozen=True, eq=False)
class PlacedExperts:
    """A step on `PlacedState`; made by `placed_experts`.

    Args:
        step: the plain step.
        dim_of: of the dotted path of a leaf of the state the dim that experts lie along; None where it has none.
    """

    step: Callable[..., Any]
    dim_of: Callable[[str], int | None]

    @property
    def __name__(self) -> str:
        """Of plans."""
        return f"placed_{getattr(self.step, '__name__', 'step')}"

    def init(self, state: Any, order: Any = None) -> PlacedState:
        """A plain state, placed.

        Args:
            state: of the plain step.
            order: as of `balanced_order`; None for that of the program.

        Raises:
            AutoparError: no leaf has experts, or leaves have different numbers of them.
        """
        count = self._count(state)
        at = jnp.arange(count, dtype=jnp.int32) if order is None else jnp.asarray(order, jnp.int32)
        return PlacedState(self._each(state, lambda leaf, dim: jnp.take(leaf, at, dim)), at)

    def plain(self, placed: PlacedState) -> Any:
        """The state as the plain step has it."""
        back = jnp.argsort(placed.order)
        return self._each(placed.state, lambda leaf, dim: jnp.take(leaf, back, dim))

    def moved(self, placed: PlacedState, order: Any) -> PlacedState:
        """The same state with experts in another order, between two steps.

        Args:
            placed: from `init` or a step.
            order: as of `balanced_order`.
        """
        new = jnp.asarray(order, jnp.int32)
        source = jnp.argsort(placed.order)[new]
        return PlacedState(self._each(placed.state, lambda leaf, dim: jnp.take(leaf, source, dim)), new)

    def __call__(self, placed: PlacedState, *batch: Any) -> Any:
        """``(placed state, what else the plain step returns)``."""
        closed, shapes = jax.make_jaxpr(self.step, return_shape=True)(placed.state, *batch)
        dims = self._dims(placed.state)
        run = PermutedRun(placed.order, self._count(placed.state))
        leaves = jax.tree.leaves(placed.state)
        values = [*map(Stored, leaves, dims), *map(Stored, jax.tree.leaves(batch))]
        results = run.run(closed, values)
        new, rest = results[: len(leaves)], results[len(leaves) :]
        state = [run.plain(v) if d is None else run.stored(v, d) for v, d in zip(new, dims, strict=True)]
        whole = jax.tree.unflatten(jax.tree.structure(shapes), [*state, *map(run.plain, rest)])
        return (PlacedState(whole[0], placed.order), *whole[1:])

    def _dims(self, state: Any) -> list[int | None]:
        return [self.dim_of(path) for path in leaf_paths(state)]

    def _each(self, state: Any, move: Callable[[Any, int], Any]) -> Any:
        leaves, tree = jax.tree.flatten(state)
        moved = [a if d is None else move(a, d) for a, d in zip(leaves, self._dims(state), strict=True)]
        return jax.tree.unflatten(tree, moved)

    def _count(self, state: Any) -> int:
        leaves = zip(jax.tree.leaves(state), self._dims(state), strict=True)
        counts = {jnp.shape(a)[d] for a, d in leaves if d is not None}
        if len(counts) != 1:
            raise AutoparError(
                f"leaves of the state have {sorted(counts) or 'no'} experts",
                cause="the function that says which dim experts lie along is wrong",
                remedy="return the dim for parameters of experts and their moments, None for all other leaves",
            )
        return counts.pop()


def placed_experts(step: Callable[..., Any], experts: Callable[[str], int | None]) -> PlacedExperts:
    """``step`` on a state whose experts lie in an order that may change between steps.

    Args:
        step: a plain train step, ``step(state, *batch) -> (state, ...)``; its state keeps its structure.
        experts: of the dotted path of a leaf of the state, as "params.up", the dim that experts lie along, or None.
            What chooses experts (a router) is no part of them; their moments are.
    """
    return PlacedExperts(step, experts)


def balanced_order(loads: Sequence[float] | NDArray[Any], devices: int) -> NDArray[np.int32]:
    """An order of experts in which devices that have the same number of them have nearly the same load.

    The largest load goes to the device that has the least and has room (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969, section 5, with room for as many experts on each).

    Args:
        loads: what each expert has to do, as tokens that came to it.
        devices: that the experts are split over; divides their number.

    Raises:
        AutoparError: it does not.
    """
    weights = np.asarray(loads, float)
    count = len(weights)
    if devices < 1 or count % devices:
        raise AutoparError(
            f"{count} experts have no equal parts on {devices} devices",
            cause="each device has as many experts as the others",
            remedy="give the number of devices that the plan splits experts over",
        )
    room = count // devices
    parts: list[list[int]] = [[] for _ in range(devices)]
    sums = [0.0] * devices
    for expert in np.argsort(-weights, kind="stable"):
        least = min((d for d in range(devices) if len(parts[d]) < room), key=lambda d: (sums[d], d))
        parts[least].append(int(expert))
        sums[least] += float(weights[expert])
    return np.array([expert for part in parts for expert in sorted(part)], np.int32)
