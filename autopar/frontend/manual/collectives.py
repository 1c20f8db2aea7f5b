"""Collectives of ``jax.lax`` inside manual regions, as computations on the pieces of all devices at once.

The pieces of a value lie in one array with a leading dim for each mesh axis that the collective goes over.
`collective_of` reads an equation, and `collective` applies a `ManualCollective` on one device's piece. Under a
`jax.vmap` with an axis's name an operand of that primitive gets a leading dim for the axis. When it has one for each
axis of the collective, the pieces of all devices are there, and what is left are ordinary operators.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from autopar._compat.primitives import def_named_batching

_REDUCE: MappingProxyType[str, Callable[..., Any]] = MappingProxyType({"max": jnp.max, "min": jnp.min})
Params = Mapping[str, Any]
Common = tuple[tuple[str, ...], tuple[int, ...], "tuple[tuple[int, ...], ...] | None"]


@dataclass(frozen=True)
class ManualCollective(ABC):
    """A collective over some axes of a mesh.

    Args:
        axes: names of the mesh axes, the slowest first.
        sizes: their sizes.
        groups: numbers of the devices that work together, where not all do.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def varies(self) -> bool:
        """Whether devices can get different results."""
        return self.groups is not None or self._varies

    @property
    @abstractmethod
    def _varies(self) -> bool:
        """`varies` where all devices work together."""

    @abstractmethod
    def _together(self, shards: Any) -> Any:
        """The result of devices that all work together: with a leading dim of devices where it varies.

        Args:
            shards: with one leading dim of devices.
        """

    def apply(self, shards: Any) -> Any:
        """The result: with a leading dim for each axis where it varies, else without any.

        Args:
            shards: with a leading dim for each axis, in order.
        """
        shape = shards.shape[len(self.axes) :]
        flat = lax.reshape(shards, (math.prod(self.sizes), *shape)) if len(self.axes) != 1 else shards
        if self.groups is None:
            result = self._together(flat)
            return self._unflat(result) if self._varies else result
        parts = []
        for group in self.groups:
            output = replace(self, sizes=(len(group),), groups=None)._together(flat[np.array(group)])
            parts.append(output if self._varies else jnp.broadcast_to(output, (len(group), *output.shape)))
        order = np.argsort(np.concatenate([np.array(g) for g in self.groups]))
        return self._unflat(jnp.concatenate(parts)[order])

    def _unflat(self, flat: Any) -> Any:
        return lax.reshape(flat, (*self.sizes, *flat.shape[1:])) if len(self.axes) != 1 else flat


@final
@dataclass(frozen=True)
class Reduce(ManualCollective):
    """``psum``, ``pmax``, ``pmin``; ``op`` is the last part of the name."""

    op: str = "sum"
    _varies = False

    def _together(self, shards: Any) -> Any:
        if self.op == "sum":
            return jnp.sum(shards, 0, dtype=shards.dtype)
        return _REDUCE[self.op](shards, 0)


@final
@dataclass(frozen=True)
class Gather(ManualCollective):
    """``all_gather``: pieces side by side along ``dim``, or ``stacked`` along a new one."""

    dim: int = 0
    stacked: bool = True
    _varies = False

    def _together(self, shards: Any) -> Any:
        moved = jnp.moveaxis(shards, 0, self.dim)
        return moved if self.stacked else _merged(moved, self.dim)


@final
@dataclass(frozen=True)
class ReduceScatter(ManualCollective):
    """``psum_scatter``: each device gets a piece of the sum along ``dim``; with ``stacked`` that dim goes away."""

    dim: int = 0
    stacked: bool = True
    _varies = True

    def _together(self, shards: Any) -> Any:
        total = jnp.sum(shards, 0, dtype=shards.dtype)
        split = total if self.stacked else _split(total, self.dim, shards.shape[0])
        return jnp.moveaxis(split, self.dim, 0)


@final
@dataclass(frozen=True)
class AllToAll(ManualCollective):
    """``all_to_all``: the piece of ``split`` with a device's number goes to it; what comes lies along ``concat``."""

    split: int = 0
    concat: int = 0
    _varies = True

    def _together(self, shards: Any) -> Any:
        parts = _split(shards, self.split + 1, shards.shape[0])  # [from, ..., to, ...]
        sent = jnp.moveaxis(parts, self.split + 1, 0)  # [to, from, ...]
        return _merged(jnp.moveaxis(sent, 1, self.concat + 1), self.concat + 1)


@final
@dataclass(frozen=True)
class ManualPermute(ManualCollective):
    """``ppermute``; ``pairs`` are (from, to). Devices to which nothing is sent get zeros."""

    pairs: tuple[tuple[int, int], ...] = ()
    _varies = True

    def _together(self, shards: Any) -> Any:
        count = shards.shape[0]
        source = {to: start for start, to in self.pairs}
        shift = source.get(0, 0) % count
        if all(source.get(to) == (to + shift) % count for to in range(count)):
            return jnp.roll(shards, -shift, 0)
        taken = shards[np.array([source.get(to, 0) for to in range(count)])]
        gets = np.array([to in source for to in range(count)]).reshape(count, *[1] * (shards.ndim - 1))
        return taken if gets.all() else jnp.where(gets, taken, jnp.zeros_like(taken))


@final
@dataclass(frozen=True)
class Broadcast(ManualCollective):
    """``pbroadcast``: all devices get the piece of ``source``."""

    source: int = 0
    _varies = False

    def _together(self, shards: Any) -> Any:
        return shards[self.source]


@final
@dataclass(frozen=True)
class Index(ManualCollective):
    """``axis_index``: each device's number; the operand is any number."""

    _varies = True

    def _together(self, shards: Any) -> Any:
        return lax.iota(np.int32, shards.shape[0])


def _split(array: Any, dim: int, count: int) -> Any:
    """``dim`` taken apart into (count, rest)."""
    shape = array.shape
    return lax.reshape(array, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))


def _merged(array: Any, dim: int) -> Any:
    """``dim`` and the one after it as one dim."""
    shape = array.shape
    return lax.reshape(array, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))


def _reduce(op: str) -> Callable[[Params, Common], ManualCollective]:
    return lambda params, common: Reduce(*common, op)


def _gather(params: Params, common: Common) -> ManualCollective:
    return Gather(*common, params["all_gather_dimension"], not params["tiled"])


def _scatter(params: Params, common: Common) -> ManualCollective:
    return ReduceScatter(*common, params["scatter_dimension"], not params["tiled"])


def _all_to_all(params: Params, common: Common) -> ManualCollective:
    return AllToAll(*common, params["split_axis"], params["concat_axis"])


def _permute(params: Params, common: Common) -> ManualCollective:
    return ManualPermute(*common, tuple((int(a), int(b)) for a, b in params["perm"]))


def _broadcast(params: Params, common: Common) -> ManualCollective:
    return Broadcast(*common, int(params["source"]))


def _index(params: Params, common: Common) -> ManualCollective:
    return Index(*common)


COLLECTIVES: Mapping[str, Callable[[Params, Common], ManualCollective]] = MappingProxyType(
    {
        "all_gather": _gather,
        "all_gather_invariant": _gather,
        "all_to_all": _all_to_all,
        "axis_index": _index,
        "pbroadcast": _broadcast,
        "pmax": _reduce("max"),
        "pmin": _reduce("min"),
        "ppermute": _permute,
        "psum": _reduce("sum"),
        "psum_invariant": _reduce("sum"),
        "reduce_scatter": _scatter,
    }
)


def collective_of(primitive: str, params: Params, sizes: Mapping[str, int]) -> tuple[ManualCollective, tuple[int, ...]]:
    """The collective that an equation is, and the dims of its operands that it goes over too.

    Args:
        primitive: name, one of `COLLECTIVES`.
        params: of the equation.
        sizes: of the mesh axes by name.
    """
    named = params["axes"] if "axes" in params else params["axis_name"]
    named = tuple(named) if isinstance(named, tuple | list) else (named,)
    axes = tuple(a for a in named if not isinstance(a, int))
    groups = params.get("axis_index_groups")
    listed = None if groups is None else tuple(tuple(int(i) for i in g) for g in groups)
    common = (axes, tuple(sizes[a] for a in axes), listed)
    return COLLECTIVES[primitive](params, common), tuple(a for a in named if isinstance(a, int))


def collective(x: Any, what: ManualCollective) -> Any:
    """The result of ``what`` on this device's piece ``x``.

    Args:
        x: an array, inside a `jax.vmap` with ``axis_name`` for each axis.
        what: the collective.
    """
    apply: Any = collective_p.bind
    return apply(x, what=what, leading=()) if what.axes else x


def _evaluated(x: Any, what: ManualCollective, leading: Sequence[str]) -> Any:
    """The result where ``x`` has a leading dim for each name in ``leading``: axes of ``what``, all of them, and others.

    The result has those dims in the same order, without the axes if it does not vary.
    """
    others = [n for n in leading if n not in what.axes]
    first = [*what.axes, *others]
    x = jnp.moveaxis(x, [leading.index(n) for n in first], range(len(first)))
    count = len(what.axes)
    function = what.apply
    for _ in others:
        function = jax.vmap(function, count, count if what.varies else 0)
    output = function(x)
    kept = [n for n in leading if what.varies or n not in what.axes]
    have = [n for n in first if n in kept]
    return jnp.moveaxis(output, [have.index(n) for n in kept], range(len(kept)))


def _type(x: Any, *, what: ManualCollective, leading: tuple[str, ...]) -> Any:
    missing = [(a, n) for a, n in zip(what.axes, what.sizes, strict=True) if a not in leading]
    full = jax.ShapeDtypeStruct((*(n for _, n in missing), *x.shape), x.dtype)
    output = jax.eval_shape(lambda v: _evaluated(v, what, (*(a for a, _ in missing), *leading)), full)
    shape = output.shape[len(missing) if what.varies else 0 :]
    return jax.core.ShapedArray(shape, output.dtype)


def _batched(
    axis: str, size: int, operands: Sequence[Any], dims: Sequence[int | None], params: dict[str, Any]
) -> tuple[Any, int | None]:
    (x,), (dim,), what, leading = operands, dims, params["what"], params["leading"]
    ours = axis in what.axes
    if dim is None and not ours:
        return collective_p.bind(x, what=what, leading=leading), None
    if dim is None and isinstance(what, Broadcast) and what.axes == (axis,):
        return x, None  # all have the same already
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    # A vmap inside the region may have no name, or one that several have.
    name = axis if ours else f"#{len(leading)}"
    leading = (name, *leading)
    if set(what.axes) <= set(leading):
        output = _evaluated(x, what, leading)
    else:
        output = collective_p.bind(x, what=what, leading=leading)
    return output, None if ours and not what.varies else 0


def _made() -> Primitive:
    primitive = Primitive("mesh_collective")
    primitive.def_abstract_eval(_type)
    def_named_batching(primitive, _batched)
    return primitive


collective_p = _made()
