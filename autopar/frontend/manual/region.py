"""A `jax.shard_map` as ordinary operators on whole arrays.

What runs on the devices of the user's mesh becomes a `jax.vmap` for each mesh axis: operands are cut into a leading dim
for each axis that their spec names, collectives become reductions and moves over those dims, and results are put
together as their specs say. The values are those of the region on its own mesh, on whatever devices the step is planned
for; how it is split there is for the planner to choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral
from jax.extend.source_info_util import current_name_stack, user_context

from autopar._compat.jaxprs import plain_params
from autopar._compat.primitives import switched
from autopar._compat.source import source_line
from autopar.errors import TraceError
from autopar.frontend.equations import PLACING, body_of, recomputes, without_shardings
from autopar.frontend.manual.collectives import (
    COLLECTIVES,
    AllToAll,
    Broadcast,
    Gather,
    Index,
    collective,
    collective_of,
)
from autopar.frontend.while_loop import while_loop


@dataclass(frozen=True)
class MeshAxes:
    """The axes over which a region is manual: name and size, in the mesh's order."""

    axes: tuple[tuple[str, int], ...]

    def mentioned(self, spec: Any, rank: int) -> list[tuple[tuple[str, int], ...]]:
        """Axes that split each dim, the slowest first."""
        sizes = dict(self.axes)
        entries = [*spec, *[None] * (rank - len(spec))]
        named = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        return [tuple((a, sizes[a]) for a in dim if a in sizes) for dim in named]


def is_manual(eqn: JaxprEqn) -> bool:
    """Whether an equation is a region of a mesh of its own."""
    return eqn.primitive.name == "shard_map"


def region(eqn: JaxprEqn) -> Any:
    """The closed jaxpr that a manual region stands for.

    Raises:
        TraceError: it has an operator that cannot be run for all devices at once; the error names it and its line.
    """
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))  # type: ignore[attr-defined]
        for v in eqn.invars
    ]

    def whole(*operands: Any) -> list[Any]:
        with user_context(eqn.source_info.traceback):
            return run_region(eqn, operands, {})

    return jax.make_jaxpr(whole)(*shapes)


def run_region(eqn: JaxprEqn, operands: Sequence[Any], outer: Mapping[str, int]) -> list[Any]:
    """Results of a region.

    Args:
        eqn: its equation.
        operands: whole arrays, or pieces of the region around it.
        outer: sizes of the axes of the regions around it.
    """
    held = [HeldCopies(x) for x in operands]
    return [copies.whole for copies in run_with_copies(eqn, held, outer, [()] * len(eqn.outvars))]


@dataclass(frozen=True)
class HeldCopies:
    """An array between two manual regions (``shard_map``) whose copies on the devices of the user's mesh may differ.

    Args:
        whole: the array, that of the first device along ``axes``.
        axes: name and size of the mesh axes along which the copies differ, by name.
        stack: the copies, with a leading dim for each of ``axes``; None where there are none.
    """

    whole: Any
    axes: tuple[tuple[str, int], ...] = ()
    stack: Any = None


def mesh_of(eqn: JaxprEqn) -> MeshAxes:
    """The axes over which a region is manual."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes", frozenset(params["mesh"].shape)))
    return MeshAxes(tuple((str(a), int(n)) for a, n in params["mesh"].shape.items() if a in manual))


def run_with_copies(
    eqn: JaxprEqn, operands: Sequence[HeldCopies], outer: Mapping[str, int], kept: Sequence[tuple[tuple[str, int], ...]]
) -> list[HeldCopies]:
    """Results of a region whose operands and results may differ along axes that their specs do not name.

    Args:
        eqn: its equation.
        operands: whole arrays, or pieces of the region around it.
        outer: sizes of the axes of the regions around it.
        kept: for each result the axes along which all copies are wanted: name and size, by name.
    """
    params, mesh = eqn.params, mesh_of(eqn)
    sizes = {**outer, **dict(mesh.axes)}
    body = Body(sizes, lambda inner, values: run_region(inner, values, sizes))
    order = [a for a, _ in mesh.axes]
    cuts = [
        _cut_copies(x, mesh.mentioned(s, x.whole.ndim), order)
        for x, s in zip(operands, params["in_specs"], strict=True)
    ]
    ranks = [len(v.aval.shape) for v in eqn.outvars]  # type: ignore[attr-defined]
    wanted = [mesh.mentioned(s, rank) for s, rank in zip(params["out_specs"], ranks, strict=True)]
    split = [{a for dim in w for a, _ in dim} for w in wanted]
    several = [n for n, axes in enumerate(kept) if axes]
    split += [split[n].union(a for a, _ in kept[n]) for n in several]

    def on_device(*shards: Any) -> list[Any]:
        outputs = body.run(params["jaxpr"], shards)
        outputs += [outputs[n] for n in several]
        # A result whose spec does not name an axis is the same along it: that of the first device.
        for axis, size in mesh.axes:
            first = Broadcast((axis,), (size,))
            outputs = [x if axis in s else collective(x, first) for x, s in zip(outputs, split, strict=True)]
        return outputs

    function: Any = on_device
    for axis, size in reversed(mesh.axes):
        function = jax.vmap(
            function,
            in_axes=tuple(0 if axis in names else None for _, names in cuts),
            out_axes=[0 if axis in s else None for s in split],
            axis_name=axis,
            axis_size=size,
        )
    results = function(*(x for x, _ in cuts))
    joined = [HeldCopies(_joined(x, w, order)) for x, w in zip(results, wanted, strict=False)]
    for n, x, named in zip(several, results[len(wanted) :], split[len(wanted) :], strict=True):
        leading = [a for a in order if a in named]
        stack = jnp.moveaxis(x, [leading.index(a) for a, _ in kept[n]], range(len(kept[n])))
        whole = _over(functools.partial(_joined, dims=wanted[n], order=order), len(kept[n]))
        joined[n] = HeldCopies(joined[n].whole, kept[n], whole(stack))
    return joined


def _over(function: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """``function`` of each array in a stack with ``count`` leading dims."""
    for _ in range(count):
        function = jax.vmap(function)
    return function


def _cut_copies(
    x: HeldCopies, dims: Sequence[tuple[tuple[str, int], ...]], order: Sequence[str]
) -> tuple[Any, list[str]]:
    """`_cut` of an array whose copies differ: each device takes its own."""
    named, varying = {a for dim in dims for a, _ in dim}, [a for a, _ in x.axes]
    if x.stack is None or named.intersection(varying) or not set(varying) <= set(order):
        return _cut(x.whole, dims, order)
    shards = _over(lambda copy: _cut(copy, dims, order)[0], len(varying))(x.stack)
    leading = [*varying, *(a for a in order if a in named)]
    names = [a for a in order if a in leading]
    return jnp.moveaxis(shards, [leading.index(a) for a in names], range(len(names))), names


def _cut(x: Any, dims: Sequence[tuple[tuple[str, int], ...]], order: Sequence[str]) -> tuple[Any, list[str]]:
    """``x`` with a leading dim for each axis that splits it, in ``order``, and the names of those axes."""
    shape: list[int] = []
    place: dict[str, int] = {}
    for n, axes in zip(x.shape, dims, strict=True):
        for axis, size in axes:
            place[axis] = len(shape)
            shape.append(size)
        shape.append(n // math.prod(size for _, size in axes))
    names = [a for a in order if a in place]
    if not names:
        return x, names
    split = lax.reshape(x, shape)
    return jnp.moveaxis(split, [place[a] for a in names], range(len(names))), names


def _joined(x: Any, dims: Sequence[tuple[tuple[str, int], ...]], order: Sequence[str]) -> Any:
    """Pieces put together: what `_cut` undoes, but for the order of the leading dims.

    Args:
        x: with a leading dim for each axis in ``dims``, in ``order``.
        dims: for each dim of the whole the axes that split it.
        order: of all axes.
    """
    named = {a for axes in dims for a, _ in axes}
    if not named:
        return x
    leading = [a for a in order if a in named]
    places: list[int] = []
    shape: list[int] = []
    for d, axes in enumerate(dims):
        places += [*(leading.index(a) for a, _ in axes), len(leading) + d]
        shape.append(math.prod(size for _, size in axes) * x.shape[len(leading) + d])
    return lax.reshape(lax.transpose(x, places), shape)


#: (equation, operands) -> results of a region inside this one.
Nested = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]


class Body:
    """Runs jaxprs of one region.

    Args:
        sizes: of the mesh axes by name.
        nested: runs a region inside this one.
    """

    def __init__(self, sizes: Mapping[str, int], nested: Nested) -> None:
        self.sizes = sizes
        self.nested = nested

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr, closed or open (then without constants).

        Raises:
            TraceError: it has an operator that cannot be run for all devices at once.
        """
        open_jaxpr: Jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        env: dict[Any, Any] = dict(zip(open_jaxpr.invars, operands, strict=True))
        env.update(zip(open_jaxpr.constvars, map(_without_mesh, getattr(jaxpr, "consts", ())), strict=True))

        def read(atom: Any) -> Any:
            return _without_mesh(atom.val) if isinstance(atom, JaxLiteral) else env[atom]

        for eqn in open_jaxpr.eqns:
            stack = current_name_stack() + eqn.source_info.name_stack
            with user_context(eqn.source_info.traceback, name_stack=stack):
                env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in open_jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            return self._collective(eqn, operands)
        if name == "ragged_all_to_all":
            return [ragged_all_to_all(eqn.params, operands, self.sizes)]
        if name in PLACING:
            return operands
        if name == "shard_map":
            return self.nested(eqn, operands)
        if name in _LOOPS:
            return _LOOPS[name](self, eqn, operands)
        opened = body_of(eqn)
        if opened is not None:
            body, taken = opened
            if recomputes(eqn):
                operands = list(lax.optimization_barrier(operands))
            return self.run(body, [operands[i] for i in taken])
        if any(type(e).__name__ == "NamedAxisEffect" for e in eqn.effects):
            raise refused(eqn)
        bind: Any = eqn.primitive.bind
        try:
            outputs = bind(*operands, **without_shardings(eqn))
        except NotImplementedError as error:
            raise refused(eqn) from error
        return outputs if eqn.primitive.multiple_results else [outputs]

    def _collective(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        what, dims = collective_of(eqn.primitive.name, eqn.params, self.sizes)
        if isinstance(what, Index):
            return [collective(jnp.int32(0), what)]
        if dims:  # only reductions go over dims of the operands too
            over: Any = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}[eqn.primitive.name]
            operands = [over(x, dims).astype(x.dtype) for x in operands]
        return [collective(x, what) for x in operands]

    def scan(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Writes a ``scan`` of the manual region as one over batched values."""
        params = plain_params("scan", eqn.params)
        first, carries = params["num_consts"], params["num_carry"]
        consts = operands[:first]

        def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.run(params["jaxpr"], [*consts, *carry, *row])
            return outputs[:carries], outputs[carries:]

        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, rows = lax.scan(body, operands[first : first + carries], operands[first + carries :], **options)
        return [*carry, *rows]

    def loop(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Writes a ``while`` of the manual region as one over batched values."""
        params = eqn.params
        in_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def goes_on(carry: Sequence[Any]) -> Any:
            return self.run(params["cond_jaxpr"], [*operands[:in_cond], *carry])[0]

        def body(carry: Sequence[Any]) -> list[Any]:
            return self.run(params["body_jaxpr"], [*operands[in_cond:first], *carry])

        return while_loop(goes_on, body, operands[first:], params["cond_jaxpr"].out_avals[0].ndim)

    def branch(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Writes a ``cond`` of the manual region as one over batched values."""

        def taken(jaxpr: Any) -> Callable[..., list[Any]]:
            return lambda *values: self.run(jaxpr, values)

        index, *rest = operands
        branches = [taken(b) for b in eqn.params["branches"]]
        return list(switched(index, branches, rest, eqn.params.get("branches_platforms")))


_LOOPS: Mapping[str, Callable[[Body, JaxprEqn, list[Any]], Sequence[Any]]] = MappingProxyType(
    {"scan": Body.scan, "while": Body.loop, "cond": Body.branch}
)


def _without_mesh(written: Any) -> Any:
    """A number or array that is written into a region, without the mesh of the region, which jax keeps in its type.

    What comes of it outside of the region would be of that mesh, and jax mixes no values of two.
    """
    return written.view() if isinstance(written, np.ndarray) else written


def refused(eqn: JaxprEqn) -> TraceError:
    """The error for an equation that cannot be run for all devices at once."""
    return TraceError(
        f"a shard_map has a {eqn.primitive.name}, which cannot be run for all devices of its mesh at once",
        cause="autopar runs the program of a shard_map or pmap for all devices of its mesh as one batch (jax.vmap), "
        "and this operator cannot be batched",
        remedy="write it with psum, all_gather, ppermute or all_to_all, or call the function on the whole arrays "
        "without shard_map: autopar splits it",
        source=source_line(eqn.source_info) or None,
    )


def ragged_all_to_all(params: Mapping[str, Any], operands: Sequence[Any], sizes: Mapping[str, int]) -> Any:
    """Rows that a device receives, in place in its output; rows without a writer keep their values.

    Args:
        params: of the equation.
        operands: rows to send, output, and by slice: where it begins, its size, where it goes, the size that comes.
        sizes: of the mesh axes by name.
    """
    rows, output, starts, lengths, targets, _ = operands
    like, _ = collective_of("all_to_all", {**params, "split_axis": 0, "concat_axis": 0}, sizes)
    exchange = AllToAll(like.axes, like.sizes, like.groups)
    # By slice that comes, senders in order: where it begins there, its size, where it goes here.
    start, length, target = (collective(x, exchange) for x in (starts, lengths, targets))
    of_all = collective(rows, Gather(like.axes, like.sizes, like.groups))
    place = jnp.arange(output.shape[0], dtype=start.dtype)[:, None]
    written = (place >= target) & (place < target + length)
    which = jnp.argmax(written, axis=1)
    row = jnp.clip(start[which] + place[:, 0] - target[which], 0, rows.shape[0] - 1)
    sender = which // (start.shape[0] // of_all.shape[0])
    there = written.any(axis=1).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(there, of_all[sender, row], output)
