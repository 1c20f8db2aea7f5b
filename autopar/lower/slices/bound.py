"""The graph of a slice of tokens, with what running it needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax import lax
from jax.extend.core import Primitive

from autopar.frontend import Bound, BoundGraph
from autopar.ir import Operator
from autopar.microbatch.tokens import SliceGraph

_FURTHER: Mapping[str, Primitive] = MappingProxyType(
    {"add": lax.add_p, "concatenate": lax.concatenate_p, "pad": lax.pad_p, "slice": lax.slice_p}
)


def bound_slice(bound: BoundGraph, sliced: SliceGraph) -> BoundGraph:
    """What running a slice's graph needs.

    Args:
        bound: the whole graph.
        sliced: a slice of it.
    """
    bounds: dict[str, Bound] = {}
    for op in sliced.graph.operators:
        origin = sliced.origins.get(op.id)
        if origin is None:
            bounds[op.id] = Bound(_FURTHER[op.primitive], dict(op.attrs), MappingProxyType({}))
        elif origin in bound.bounds:
            bounds[op.id] = _resized(op, bound.graph.by_id[origin], bound.bounds[origin])
    return BoundGraph(sliced.graph, bounds, bound.constants)


def _resized(op: Operator, whole: Operator, bound: Bound) -> Bound:
    """The parameters of an operator with the sizes of its slice."""
    if op.attrs == whole.attrs:
        return bound
    old = dict(whole.attrs)
    changed = {key: value for key, value in op.attrs if old[key] != value}
    return Bound(bound.primitive, {**bound.params, **changed}, bound.regions)
