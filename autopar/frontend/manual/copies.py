"""Arrays between manual regions whose copies differ along a mesh axis that no spec names.

The backward pass of a region takes results of its forward pass. Under ``jax.vmap(spmd_axis_name=...)`` with
``check_vma=False`` jax names in their specs all axes but that of the vmap, though they differ along it too: each device
reads the copy that it wrote. `with_copies` makes a program in which such results are stacks of copies, also where loops
and branches hand them on. Other operators between two regions take the copy of the first device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.jaxprs import plain_params
from autopar._compat.primitives import switched
from autopar.frontend.attrs import result_shardings
from autopar.frontend.equations import bind_equation, body_of, interpreted, recomputes, shapes_of
from autopar.frontend.manual.collectives import COLLECTIVES, collective_of
from autopar.frontend.manual.region import HeldCopies, is_manual, mesh_of, run_with_copies

#: Name and size of mesh axes, sorted.
Axes: TypeAlias = tuple[tuple[str, int], ...]

#: Applied to an array and to each of its copies.
_PASSED_ON = frozenset({"convert_element_type", "copy", "name", "neg", "optimization_barrier", "reduce_precision"})


def with_copies(closed: ClosedJaxpr) -> ClosedJaxpr:
    """``closed`` with stacks for results of regions whose copies differ; itself where there are none.

    Args:
        closed: a program.
    """
    if not any(any(_kept(eqn)) for eqn in _regions(closed.jaxpr)):
        return closed

    def run(*arrays: Any) -> list[Any]:
        values = [HeldCopies(x) for x in (*closed.consts, *arrays)]
        return [x.whole for x in _run(closed.jaxpr, values)]

    return jax.make_jaxpr(run)(*shapes_of(closed.jaxpr.invars))


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if isinstance(jaxpr, Jaxpr):
                yield jaxpr


def _regions(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The outermost regions of a program."""
    for eqn in jaxpr.eqns:
        if is_manual(eqn):
            yield eqn
        else:
            for body in _bodies(eqn):
                yield from _regions(body)


# -- along which axes results differ ------------------------------------------------------------------


def _kept(eqn: JaxprEqn) -> list[Axes]:
    """Axes along which copies of each result of a region may differ though its spec does not name them."""
    mesh = mesh_of(eqn)
    if eqn.params.get("check_vma", True):
        return [()] * len(eqn.outvars)
    sizes = dict(mesh.axes)
    given: list[frozenset[str]] = []
    for v, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
        rank = len(v.aval.shape)  # type: ignore[attr-defined]
        given.append(frozenset(a for dim in mesh.mentioned(spec, rank) for a, _ in dim))
    differ = _differ(eqn.params["jaxpr"], given, sizes)
    kept = []
    for v, spec, axes in zip(eqn.outvars, eqn.params["out_specs"], differ, strict=True):
        named = {a for dim in mesh.mentioned(spec, len(v.aval.shape)) for a, _ in dim}  # type: ignore[attr-defined]
        kept.append(tuple((a, n) for a, n in sorted(mesh.axes) if a in axes and a not in named))
    return kept


def _differ(jaxpr: Any, given: Sequence[frozenset[str]], sizes: Mapping[str, int]) -> list[frozenset[str]]:
    """Axes along which the results of a body may differ, from those along which its arguments do."""
    inner: Jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    none: frozenset[str] = frozenset()
    env: dict[Any, frozenset[str]] = dict(zip(inner.invars, given, strict=True))

    def read(atom: Any) -> frozenset[str]:
        return none if isinstance(atom, JaxLiteral) else env.get(atom, none)

    for eqn in inner.eqns:
        operands = [read(v) for v in eqn.invars]
        together = none.union(*operands)
        name = eqn.primitive.name
        if name in COLLECTIVES:
            what, _ = collective_of(name, eqn.params, sizes)
            env.update(
                (v, together | set(what.axes) if what.varies else together - set(what.axes)) for v in eqn.outvars
            )
            continue
        opened = None if name == "shard_map" else body_of(eqn)
        if opened is not None:
            results = _differ(opened[0], [operands[i] for i in opened[1]], sizes)
        else:
            inside = none.union(*_named(eqn, sizes))
            results = [together | inside] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in inner.outvars]


def _named(eqn: JaxprEqn, sizes: Mapping[str, int]) -> Iterator[frozenset[str]]:
    """Axes by whose number values differ inside the bodies of an operator."""
    inner = {**sizes, **dict(mesh_of(eqn).axes)} if is_manual(eqn) else sizes
    for body in _bodies(eqn):
        for e in body.eqns:
            if e.primitive.name in COLLECTIVES:
                what, _ = collective_of(e.primitive.name, e.params, inner)
                if what.varies:
                    yield frozenset(what.axes)
            yield from _named(e, inner)


# -- the program --------------------------------------------------------------------------------------


def _run(jaxpr: Any, values: Sequence[HeldCopies]) -> list[HeldCopies]:
    """Results of a jaxpr; ``values`` are its constants, where it is open, and its arguments."""
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, values = jaxpr.jaxpr, [*map(HeldCopies, jaxpr.consts), *values]
    return interpreted(jaxpr, values, "", lambda eqn, given, _: _equation(eqn, given), HeldCopies)


def _equation(eqn: JaxprEqn, values: list[HeldCopies]) -> list[HeldCopies]:
    if is_manual(eqn):
        return run_with_copies(eqn, values, {}, _kept(eqn))
    if eqn.primitive.name in _PASSED_ON:
        return _passed_on(eqn, values)
    if any(True for body in _bodies(eqn) for _ in _regions(body)):
        opened = body_of(eqn)
        if opened is not None:
            return _opened(eqn, opened, values)
        if eqn.primitive.name == "scan":
            return _scan(eqn, values)
        if eqn.primitive.name == "cond":
            return _cond(eqn, values)
    return [HeldCopies(x) for x in bind_equation(eqn, [v.whole for v in values], {})]


def _passed_on(eqn: JaxprEqn, values: list[HeldCopies]) -> list[HeldCopies]:
    if eqn.primitive.name == "optimization_barrier":
        return _barrier(values)
    (whole,) = bind_equation(eqn, [values[0].whole], {})
    if values[0].stack is None:
        return [HeldCopies(whole)]
    return [HeldCopies(whole, values[0].axes, *bind_equation(eqn, [values[0].stack], {}))]


def _barrier(values: Sequence[HeldCopies]) -> list[HeldCopies]:
    passed = lax.optimization_barrier(_flat(values))
    return _values(passed, [v.axes for v in values])


def _opened(eqn: JaxprEqn, opened: tuple[Any, Sequence[int]], values: list[HeldCopies]) -> list[HeldCopies]:
    body, taken = opened
    results = _run(body, [(_barrier(values) if recomputes(eqn) else values)[i] for i in taken])
    for n, sharding in enumerate(result_shardings(eqn)):
        if sharding is not None:
            results[n] = HeldCopies(lax.with_sharding_constraint(results[n].whole, sharding))
    return results


def _scan(eqn: JaxprEqn, values: list[HeldCopies]) -> list[HeldCopies]:
    params = plain_params("scan", eqn.params)
    first, carries = params["num_consts"], params["num_carry"]
    consts, initial = values[:first], values[first : first + carries]
    rows = [_moved(v, len(v.axes), 0) for v in values[first + carries :]]
    carried, of_results = [v.axes for v in initial], list[Axes]()

    def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [*consts, *_values(carry, carried), *_values(row, [v.axes for v in rows])]
        results = _run(params["jaxpr"], given)
        of_results[:] = [v.axes for v in results]
        after = [_spread(v, a) if set(v.axes) <= set(a) else v for v, a in zip(results, carried, strict=False)]
        return _flat(after), _flat(results[carries:])

    while True:
        start = _flat([_spread(v, a) for v, a in zip(initial, carried, strict=True)])
        jax.eval_shape(body, start, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in _flat(rows)])
        joined = [_union(a, b) for a, b in zip(carried, of_results, strict=False)]
        if joined == carried:
            break
        carried = joined
    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, start, _flat(rows), **options)
    stacked = [_moved(v, 0, len(v.axes)) for v in _values(ys, of_results[carries:])]
    return [*_values(carry, carried), *stacked]


def _cond(eqn: JaxprEqn, values: list[HeldCopies]) -> list[HeldCopies]:
    index, operands = values[0].whole, values[1:]
    axes: list[Axes] = [()] * len(eqn.outvars)
    given = [v.axes for v in operands]

    def branch(jaxpr: Any) -> Any:
        def run(*arrays: Any) -> list[Any]:
            results = _run(jaxpr, _values(arrays, given))
            axes[:] = [_union(a, v.axes) for a, v in zip(axes, results, strict=True)]
            return _flat([_spread(v, a) for v, a in zip(results, axes, strict=True)])

        return run

    branches = [branch(b) for b in eqn.params["branches"]]
    flat = _flat(operands)
    for run in branches:  # until all branches have said along which axes their results differ
        jax.eval_shape(run, *flat)
    return _values(switched(index, branches, flat, eqn.params.get("branches_platforms")), axes)


# -- arrays and copies as one list --------------------------------------------------------------------


def _flat(values: Sequence[HeldCopies]) -> list[Any]:
    return [x for v in values for x in ((v.whole,) if v.stack is None else (v.whole, v.stack))]


def _values(flat: Sequence[Any], axes: Sequence[Axes]) -> list[HeldCopies]:
    arrays = iter(flat)
    return [HeldCopies(next(arrays), a, next(arrays) if a else None) for a in axes]


def _moved(v: HeldCopies, source: int, target: int) -> HeldCopies:
    return v if v.stack is None else HeldCopies(v.whole, v.axes, jnp.moveaxis(v.stack, source, target))


def _spread(v: HeldCopies, axes: Axes) -> HeldCopies:
    """The value with a copy for each device along ``axes``, among which its own are."""
    if v.axes == axes:
        return v
    whole = jnp.asarray(v.whole)
    copies = whole if v.stack is None else v.stack
    count = len(axes)
    dims = [*(axes.index(a) for a in v.axes), *range(count, count + whole.ndim)]
    return HeldCopies(whole, axes, lax.broadcast_in_dim(copies, (*(n for _, n in axes), *whole.shape), dims))


def _union(first: Axes, second: Axes) -> Axes:
    return tuple(sorted({*first, *second}))
