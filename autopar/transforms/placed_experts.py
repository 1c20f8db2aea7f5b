"""`placed_experts`: experts lie in an order that measured loads decide, and that changes between steps.

Where a plan splits the experts each device has as many of them as the others, those that lie next to each other. Which
these are the program decides, and one device may have all that are asked for. Here a placement does: the parameters of
experts lie in its order, tokens are sent to where they lie, and results are those of the plain step to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral
from numpy.typing import NDArray

from autopar._compat.jaxprs import plain_params
from autopar._compat.primitives import bind
from autopar.errors import AutoparError
from autopar.ir.primitives import CASTS, ELEMENTWISE, PASSED_ON, REDUCTIONS
from autopar.transforms.split import place_of
from autopar.transforms.state import leaf_paths


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


_CALLS: Mapping[str, str] = MappingProxyType(
    {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
)
_SAME_SHAPE = (ELEMENTWISE | CASTS | {"stop_gradient", "copy_p", "name"}) - {"nextafter"}


@dataclass(frozen=True)
class Stored:
    """A value of the step.

    Args:
        array: the array.
        dim: along which its slices lie in the stored order; None where it is as the program says.
    """

    array: Any
    dim: int | None = None


@dataclass(frozen=True)
class PermutedRun:
    """Runs jaxprs on values some of which lie in another order.

    Args:
        order: for each place of the stored order the number of the slice that lies there.
        count: number of slices.
    """

    order: Any
    count: int

    @cached_property
    def inverse(self) -> Any:
        """Place of each slice."""
        return jnp.argsort(self.order)

    def stored(self, value: Stored, dim: int) -> Any:
        """The array with slices along ``dim`` in the stored order."""
        return value.array if value.dim == dim else jnp.take(self.plain(value), self.order, dim)

    def plain(self, value: Stored) -> Any:
        """The array as the program says."""
        return value.array if value.dim is None else jnp.take(value.array, self.inverse, value.dim)

    def run(self, closed: ClosedJaxpr, values: Sequence[Stored]) -> list[Stored]:
        """Results of a jaxpr.

        Args:
            closed: the jaxpr.
            values: of its inputs.
        """
        return self._run(closed.jaxpr, [Stored(c) for c in closed.consts], values)

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Stored], values: Sequence[Stored]) -> list[Stored]:
        env: dict[Any, Stored] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

        def read(atom: Any) -> Stored:
            return Stored(atom.val) if isinstance(atom, JaxLiteral) else env[atom]

        for eqn in jaxpr.eqns:
            with place_of(eqn):
                results = self._equation(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, values: list[Stored]) -> list[Stored]:
        name = eqn.primitive.name
        if all(v.dim is None for v in values):
            return [Stored(a) for a in bind(eqn.primitive, eqn.params, [v.array for v in values])]
        if name in _CALLS and not eqn.effects:
            inner: Any = eqn.params[_CALLS[name]]
            return self.run(inner, values)
        if name in ("checkpoint", "remat2"):
            return self._recomputed(eqn, values)
        if name == "scan":
            return self._scan(eqn, values)
        if name in PASSED_ON:
            return [
                Stored(a, v.dim)
                for a, v in zip(bind(eqn.primitive, eqn.params, [v.array for v in values]), values, strict=True)
            ]
        dims = _DIMS[name](eqn, [v.dim for v in values], self.count) if name in _DIMS else None
        if dims is None:
            return [Stored(a) for a in bind(eqn.primitive, eqn.params, [self.plain(v) for v in values])]
        taken, result = dims
        arrays = [v.array if d is None else self.stored(v, d) for v, d in zip(values, taken, strict=True)]
        return [Stored(a, result) for a in bind(eqn.primitive, eqn.params, arrays)]

    def _recomputed(self, eqn: JaxprEqn, values: list[Stored]) -> list[Stored]:
        """A function that is recomputed in the backward pass, as such."""
        dims: list[int | None] = []

        def run(*arrays: Any) -> list[Any]:
            given = [Stored(a, v.dim) for a, v in zip(arrays, values, strict=True)]
            results = self._run(eqn.params["jaxpr"], [], given)
            dims[:] = [r.dim for r in results]
            return [r.array for r in results]

        policy, cse = eqn.params["policy"], eqn.params["prevent_cse"]
        arrays = jax.checkpoint(run, policy=policy, prevent_cse=cse)(*(v.array for v in values))
        return [Stored(a, d) for a, d in zip(arrays, dims, strict=True)]

    def _scan(self, eqn: JaxprEqn, values: list[Stored]) -> list[Stored]:
        """A loop: what it carries lies at the end of each turn as it did at the beginning."""
        p: Any = plain_params("scan", eqn.params)
        first, whole = p["num_consts"], p["num_consts"] + p["num_carry"]
        slices = [Stored(self.plain(v)) if v.dim == 0 else v for v in values[whole:]]
        consts, carried = values[:first], [v.dim for v in values[first:whole]]
        inside = [None if v.dim is None else v.dim - 1 for v in slices]
        dims: list[int | None] = []

        def body(carry: Any, xs: Any) -> Any:
            here = [Stored(a, d) for a, d in zip((*carry, *xs), (*carried, *inside), strict=True)]
            results = self.run(p["jaxpr"], [*consts, *here])
            ends, ys = results[: p["num_carry"]], results[p["num_carry"] :]
            dims[:] = [y.dim for y in ys]
            kept = [self.plain(v) if d is None else self.stored(v, d) for v, d in zip(ends, carried, strict=True)]
            return kept, [y.array for y in ys]

        ends, ys = lax.scan(
            body,
            [v.array for v in values[first:whole]],
            [v.array for v in slices],
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        stacked = [Stored(a, None if d is None else d + 1) for a, d in zip(ys, dims, strict=True)]
        return [*(Stored(a, d) for a, d in zip(ends, carried, strict=True)), *stacked]


#: (equation, stored dims of its operands, number of slices) -> dims that operands are to have stored (None: as they
#: are, for those without the dim), and that of the results; None where the equation tells slices apart.
_Dims = Callable[[JaxprEqn, Sequence[int | None], int], tuple[list[int | None], int | None] | None]


def _one(dims: Sequence[int | None]) -> int | None:
    """The dim, where all that have one have the same."""
    different = {d for d in dims if d is not None}
    return different.pop() if len(different) == 1 else None


def _in_place(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    dim = _one(dims)
    shapes = [_shape(v) for v in eqn.invars]
    if dim is None or any(len(s) not in (0, len(_shape(eqn.outvars[0]))) for s in shapes):
        return None
    return [dim if s and s[dim] == count else None for s in shapes], dim


def _reduced(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    (dim,), axes = dims, eqn.params["axes"]
    assert dim is not None
    return [dim], None if dim in axes else dim - sum(a < dim for a in axes)


def _product(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    wanted: set[tuple[int | None, int | None, int | None]] = set()
    for side, dim in enumerate(dims):
        if dim is None:
            continue
        for pairs, is_batch in ((contracted, False), (batch, True)):
            if dim in pairs[side]:
                n = pairs[side].index(dim)
                wanted.add((pairs[0][n], pairs[1][n], n if is_batch else None))
        if dim not in (*contracted[side], *batch[side]):
            before = [d for d in range(dim) if d not in (*contracted[side], *batch[side])]
            free = len(_shape(eqn.invars[0])) - len(contracted[0]) - len(batch[0]) if side else 0
            at = len(batch[0]) + len(before) + free
            wanted.add((None, dim, at) if side else (dim, None, at))
    if len(wanted) != 1:
        return None
    left, right, result = wanted.pop()
    return [left, right], result


def _broadcast(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    dim = dims[0]
    return None if dim is None else ([dim, *[None] * (len(dims) - 1)], eqn.params["broadcast_dimensions"][dim])


def _transposed(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    return [dims[0]], eqn.params["permutation"].index(dims[0])


def _reshaped(eqn: JaxprEqn, dims: Sequence[int | None], count: int) -> Any:
    """A reshape that neither cuts the dim nor joins it with others."""
    dim, shape, result = dims[0], _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    assert dim is not None
    before = _size(shape[:dim])
    for at, n in enumerate(result):
        if n == count and _size(result[:at]) == before:
            return [dim, *[None] * (len(dims) - 1)], at
    return None


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


_DIMS: Mapping[str, _Dims] = MappingProxyType(
    {
        **dict.fromkeys(_SAME_SHAPE, _in_place),
        **dict.fromkeys(REDUCTIONS, _reduced),
        **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
        "dot_general": _product,
        "broadcast_in_dim": _broadcast,
        "transpose": _transposed,
    }
)
