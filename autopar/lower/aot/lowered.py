"""Collectives of a lowered program, before any compiler saw it: counted in its jaxpr.

They tell two causes of a difference apart: where lowered and predicted differ, the plan or the lowering is wrong;
where compiled and lowered differ, the compiler rewrote something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from autopar.ir.loops import ASSUMED_ITERATIONS
from autopar.lower.aot.groups import GroupNames
from autopar.lower.aot.rewrites import Key

#: jax's primitives: what they are counted as, and whether bytes are those of the result rather than of the operand.
_PRIMITIVES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "psum": ("all-reduce", False),
        "psum2": ("all-reduce", False),
        "psum_invariant": ("all-reduce", False),
        "pmax": ("all-reduce", False),
        "pmin": ("all-reduce", False),
        "all_gather": ("all-gather", True),
        "all_gather_invariant": ("all-gather", True),
        "reduce_scatter": ("reduce-scatter", False),
        "all_to_all": ("all-to-all", False),
        "ppermute": ("collective-permute", False),
    }
)

#: Sums over devices, and what may stand between them.
_SUMS = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter"})
_PASSED = frozenset({"add", "add_any", "convert_element_type"})


def counted_collectives(
    function: Callable[..., Any], arguments: Sequence[Any], axes: tuple[tuple[str, int], ...]
) -> tuple[dict[Key, float], dict[Key, float]]:
    """Runs of each collective of a function, and the number of these runs that compilers can do without.

    Keys are kind, axes and bytes of the full tensor. Bodies of loops count once an iteration (`ASSUMED_ITERATIONS`
    where the number is decided at run time), each of k branches 1/k. A compiler can do without a collective that
    repeats another one, or whose result is added to a like result: one collective of the sum does (XLA's reassociation
    of all-reduce and reduce-scatter).

    Args:
        function: of global arrays, over all devices of a mesh.
        arguments: the shapes, dtypes and shardings of its arguments.
        axes: (axis, size) of the mesh.
    """
    names, sizes = GroupNames(axes), dict(axes)
    counts: dict[Key, float] = {}
    equal: dict[Key, float] = {}
    closed = jax.make_jaxpr(function)(*arguments)
    seen: set[Any] = set()
    summed: dict[Any, Key] = {}
    for eqn, times, number in _equations(closed.jaxpr, 1.0, _Numbers()):
        if eqn.primitive.name in _PASSED:
            keys = {summed.get(v) if hasattr(v, "aval") and not hasattr(v, "val") else None for v in eqn.invars}
            (key,) = keys if len(keys) == 1 else (None,)
            if key is not None:
                summed[eqn.outvars[0]] = key
                if len(eqn.invars) > 1:
                    equal[key] = equal.get(key, 0.0) + times
            continue
        kind, of_result = _PRIMITIVES[eqn.primitive.name]
        given = eqn.params.get("axes", eqn.params.get("axis_name"))
        along = tuple(a for a in (given if isinstance(given, tuple | list) else (given,)) if isinstance(a, str))
        n = math.prod(sizes[a] for a in along)
        if n == 1:
            continue
        for var in eqn.outvars if of_result else eqn.invars:
            size = var.aval.size * var.aval.dtype.itemsize * (n if kind == "all-to-all" else 1)
            key = (kind, names.ordered(along), size)
            counts[key] = counts.get(key, 0.0) + times
            if number in seen:
                equal[key] = equal.get(key, 0.0) + times
            elif eqn.primitive.name in _SUMS:
                summed[eqn.outvars[eqn.invars.index(var)]] = key
        seen.add(number)
    return counts, equal


@dataclass
class _Numbers:
    """Numbers of values: equal ones are computed in the same way from the same."""

    of_value: dict[Any, int] = field(default_factory=dict)
    of_work: dict[Any, int] = field(default_factory=dict)

    def operand(self, atom: Any) -> int:
        if hasattr(atom, "val"):
            return self.work(("literal", str(atom.aval), repr(atom.val)))
        if atom not in self.of_value:
            self.of_value[atom] = self.work(("input", len(self.of_value)))
        return self.of_value[atom]

    def work(self, key: Any) -> int:
        return self.of_work.setdefault(key, len(self.of_work))

    def equation(self, eqn: Any) -> int:
        """Notes the results of an equation; returns the number of what it does."""
        params = tuple(f"{name}={value}" for name, value in sorted(eqn.params.items(), key=lambda p: p[0]))
        number = self.work((eqn.primitive.name, params, tuple(map(self.operand, eqn.invars))))
        for i, var in enumerate(eqn.outvars):
            self.of_value[var] = self.work(("result", number, i))
        return number


def _equations(jaxpr: Any, times: float, numbers: _Numbers) -> Iterator[tuple[Any, float, int]]:
    """Collectives and sums of a jaxpr and of those inside it, how often each runs, and the number of what it does."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [sub for value in eqn.params.values() for sub in _jaxprs(value)]
        if name in _PRIMITIVES or not inner:
            number = numbers.equation(eqn)
            if name in _PRIMITIVES or name in _PASSED:
                yield eqn, times, number
            continue
        factor = {
            "scan": float(eqn.params.get("length", 1)),
            "while": ASSUMED_ITERATIONS,
            "cond": 1.0 / max(1, len(inner)),
        }.get(name, 1.0)
        for sub in inner:
            yield from _equations(sub, times * factor, numbers)


def _jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
