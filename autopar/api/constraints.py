"""``parallelize(constraints=...)``: what the user fixes of where arguments lie, by path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autopar.cluster.mesh import prime_factors
from autopar.errors import ConstraintError
from autopar.errors.names import near_names
from autopar.ir import Graph, TensorType
from autopar.plan.arguments import path_matches, path_parts
from autopar.plan.text import seconds_text
from autopar.search.constraints import FREE, SPLIT, Constraint, can_hold

#: Constraints up to this number are priced one by one, each by another plan; more are priced together.
MOST_PRICED = 8


@dataclass(frozen=True)
class Pin:
    """One entry of ``constraints``.

    Args:
        pattern: path with ``*`` for one part and ``**`` for any number of parts.
        dims: dims that are split, all others are whole; None where a spec is given.
        spec: for each dim the number of shards, `FREE` for any; dims after its end are whole.
        text: the entry as the user wrote it.
    """

    pattern: str
    dims: tuple[int, ...] | None
    spec: tuple[int, ...]
    text: str


def parse_pins(constraints: Mapping[str, Any] | None, mesh_axes: Mapping[str, int] | None) -> tuple[Pin, ...]:
    """The entries of ``constraints``, checked.

    Args:
        constraints: path -> dims that are split (``()``: whole), or a `PartitionSpec`.
        mesh_axes: sizes of the mesh axes that specs name.

    Raises:
        ConstraintError: an entry is neither, or names an axis that ``mesh_axes`` does not have.
    """
    axes = dict(mesh_axes or {})
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConstraintError(
                f"mesh_axes[{name!r}]={size!r} is no size", remedy='mesh_axes={"data": 4, "model": 2}'
            )
    if not isinstance(constraints, Mapping | None):
        raise ConstraintError(
            f"constraints={constraints!r} is no mapping", remedy='constraints={"params/w": (0,)}, from path to dims'
        )
    return tuple(_pin(pattern, what, axes) for pattern, what in (constraints or {}).items())


def _pin(pattern: str, what: Any, axes: Mapping[str, int]) -> Pin:
    if isinstance(what, PartitionSpec):
        return Pin(pattern, None, tuple(_count(pattern, entry, axes) for entry in what), str(what))
    if isinstance(what, int) and not isinstance(what, bool):
        what = (what,)
    if isinstance(what, tuple | list) and all(isinstance(d, int) and not isinstance(d, bool) for d in what):
        return Pin(pattern, tuple(what), (), str(tuple(what)))
    raise ConstraintError(
        f"constraints[{pattern!r}]={what!r} is neither dims nor a PartitionSpec",
        remedy="(0,) for a first dim that is split, () for an array that is whole, or PartitionSpec('data', None) with "
        "mesh_axes={'data': 4}",
    )


def _count(pattern: str, entry: Any, axes: Mapping[str, int]) -> int:
    if entry is PartitionSpec.UNCONSTRAINED:
        return FREE
    names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    unknown = [n for n in names if n not in axes]
    if unknown:
        raise ConstraintError(
            f"constraints[{pattern!r}] names the mesh axis {unknown[0]!r}; mesh_axes has "
            f"{', '.join(map(repr, axes)) or 'none'}",
            remedy=f"mesh_axes={{{unknown[0]!r}: size, ...}}",
        )
    return math.prod(axes[n] for n in names)


def constraints_of(
    pins: Sequence[Pin], graph: Graph, devices: int, names: Callable[[int], Sequence[str]] | None = None
) -> tuple[Constraint, ...]:
    """Constraints of the inputs of ``graph`` from ``pins``; of several that match one input the last counts.

    Args:
        pins: from `parse_pins`.
        graph: of the step.
        devices: number of devices in all.
        names: for the index of an input the names under which it is planned; None for its own.

    Raises:
        ConstraintError: a path is that of no input, or what is asked for cannot hold on any mesh.
    """
    paths = [i.name for i in graph.inputs]
    constraints: dict[str, Constraint] = {}
    for pin in pins:
        at = [n for n, path in enumerate(paths) if path_matches(pin.pattern, path)]
        if not at:
            raise ConstraintError(
                f"constraints[{pin.pattern!r}] is the path of no array argument of {graph.name}",
                cause="paths have the names of arguments and keys: state/params/w",
                remedy=near_names(pin.pattern, ("/".join(path_parts(p)) for p in paths)) or None,
            )
        for n in at:
            shards = _shards(pin, paths[n], graph.inputs[n].type, devices)
            for name in [paths[n]] if names is None else names(n):
                constraints[name] = Constraint(name, shards, f"{pin.pattern}: {pin.text}")
    return tuple(constraints[k] for k in sorted(constraints))


def void_notes(pins: Sequence[Pin], paths: Sequence[str]) -> dict[Pin, str]:
    """Entries that fix nothing, as later ones say otherwise of all that they match, each with a line for the user.

    Args:
        pins: in the order of ``constraints``.
        paths: of the inputs.
    """
    notes = {}
    for n, pin in enumerate(pins):
        last = [
            [p for p in pins[n:] if path_matches(p.pattern, path)][-1]
            for path in paths
            if path_matches(pin.pattern, path)
        ]
        if pin not in last:
            by = ", ".join(dict.fromkeys(p.pattern for p in last))
            why = f"later entries replace it for every array that it matches ({by})"
            notes[pin] = f"constraint {pin.pattern}: {pin.text} does nothing: {why}"
    return notes


def merged(current: Sequence[Constraint], pinned: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Constraints of both; what the user pinned comes before where an input lies."""
    return tuple({c.value: c for c in (*current, *pinned)}.values())


def _shards(pin: Pin, path: str, type: TensorType, devices: int) -> tuple[int, ...]:
    if pin.dims is None:
        if len(pin.spec) > type.rank:
            raise _impossible(pin, path, type, f"it has {type.rank} dims, not {len(pin.spec)}")
        shards = (*pin.spec, *[1] * (type.rank - len(pin.spec)))
    else:
        wrong = [d for d in pin.dims if not -type.rank <= d < type.rank]
        if wrong:
            raise _impossible(pin, path, type, f"it has no dim {wrong[0]}")
        split = {d % type.rank for d in pin.dims}
        shards = tuple(SPLIT if d in split else 1 for d in range(type.rank))
    if not can_hold(shards, type, prime_factors(devices)):
        raise _impossible(pin, path, type, f"{devices} devices cannot split its dims so")
    return shards


def _impossible(pin: Pin, path: str, type: TensorType, why: str) -> ConstraintError:
    return ConstraintError(
        f"the constraint {pin.pattern}: {pin.text} cannot hold on {path} {type}: {why}",
        cause="a dim is split into as many shards as some mesh axes have devices, if that divides its size",
        remedy="another dim or another number of shards",
    )


def price_note(pins: Sequence[Pin], step_s: float, free_s: float) -> str:
    """The seconds that constraints cost, as a line for the user.

    Args:
        pins: the constraints.
        step_s: seconds of a step with them.
        free_s: seconds of a step where they alone are left free.
    """
    name = (
        f"constraint {pins[0].pattern}: {pins[0].text}" if len(pins) == 1 else f"constraints, all {len(pins)} together"
    )
    more = step_s - free_s
    cost = "costs nothing" if more <= 1e-9 * free_s else f"costs {seconds_text(more)} a step ({more / free_s:.1%})"
    return f"{name}: {cost} against leaving it free"
