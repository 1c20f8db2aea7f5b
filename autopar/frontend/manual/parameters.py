"""Maps an equation of jax to its `ManualCollective`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from autopar.frontend.manual.kinds import (
    AllToAll,
    Broadcast,
    Gather,
    Index,
    ManualCollective,
    ManualPermute,
    Reduce,
    ReduceScatter,
)

Params = Mapping[str, Any]
Common = tuple[tuple[str, ...], tuple[int, ...], "tuple[tuple[int, ...], ...] | None"]


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
