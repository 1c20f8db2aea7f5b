"""Collectives of a program by kind and mesh axes: names of their groups, what a jaxpr has, what XLA replaced.

`GroupNames` says along which axes of the mesh a collective runs. `counted_collectives` counts those of a jaxpr, before
any compiler saw it. They tell two causes of a difference apart: where lowered and predicted differ, the plan or the
lowering is wrong; where compiled and lowered differ, the compiler rewrote something.

`paired` pairs what was predicted and not found with what was found and not predicted, as compilers rewrite collectives
where that is faster on their devices. Each rule needs the same mesh axes and fitting bytes:

    along ... at once     all-reduce along one axis and then along another, done at once along both
    joined                several small ones concatenated into one
    other width           a conversion to a dtype of half the width (or twice) was moved to the other side
    done once             of several equal ones, or of sums that are added up, one is left
    as all-reduce         reduce-scatter done as all-reduce and slice; all-gather as all-reduce of padded pieces
    axis by axis          one along several axes, done along one after the other

The pairing is by figures alone, as the text of a compiled program does not name what an instruction replaced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from autopar.cost import wire_bytes
from autopar.ir.loops import ASSUMED_ITERATIONS
from autopar.lower.hlo import Groups
from autopar.lower.reshard import exchange

Axes = Sequence[tuple[str, int]]
_Key = frozenset[tuple[int, ...]]
#: Kind, axes in mesh order joined by ``+``, bytes of the full tensor.
Key = tuple[str, str, int]
Counts = MutableMapping[Key, float]

_NONE = 1e-9
#: Pieces that are concatenated may be padded by this share.
_PADDING = 0.005
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


def groups_along(axes: Axes, names: Sequence[str]) -> Groups:
    """Groups of devices, numbered in mesh order, that differ only along the axes ``names``, the first one major."""
    every = [a for a, _ in axes]
    numbers = np.arange(math.prod(n for _, n in axes)).reshape([n for _, n in axes])
    order = [every.index(a) for a in every if a not in names] + [every.index(a) for a in names]
    size = math.prod(n for a, n in axes if a in names)
    return tuple(tuple(map(int, row)) for row in numbers.transpose(order).reshape(-1, size))


def pairs_along(axes: Axes, names: Sequence[str]) -> Groups:
    """(source, target) of the permutation that exchanges two axes, without those that stay."""
    sizes = dict(axes)
    swaps = exchange(*(sizes[a] for a in names))
    return tuple((g[i], g[j]) for g in groups_along(axes, names) for i, j in swaps if i != j)


class GroupNames:
    """Names of the groups that a mesh's axes make."""

    def __init__(self, axes: Axes) -> None:
        self.axes = tuple(axes)
        wide = [a for a, n in axes if n > 1]
        subsets = [c for r in range(1, len(wide) + 1) for c in itertools.combinations(wide, r)]
        self._groups: dict[_Key, str] = {}
        for names in subsets:
            key = frozenset(tuple(sorted(g)) for g in groups_along(axes, names))
            self._groups.setdefault(key, "+".join(names))
        self._pairs: dict[_Key, str] = {}
        for a, b in itertools.permutations(wide, 2):
            self._pairs.setdefault(frozenset(pairs_along(axes, (a, b))), self.ordered((a, b)))

    def ordered(self, names: Sequence[str]) -> str:
        """Axes in the order of the mesh, joined by ``+``; those of one device left out."""
        return "+".join(a for a, n in self.axes if a in names and n > 1)

    def of(self, kind: str, groups: Groups) -> str:
        """The axes of a collective's groups; of others their number and size."""
        if kind == "collective-permute":
            moved = frozenset((s, t) for s, t in groups if s != t)
            return self._pairs.get(moved, f"{len(moved)} pairs")
        name = self._groups.get(frozenset(tuple(sorted(g)) for g in groups))
        return name or f"{len(groups)} groups of {max(map(len, groups))}"


@dataclass(frozen=True)
class Rewrite:
    """Predicted collectives that XLA did in another way.

    Args:
        key: what was predicted.
        count: how many of them.
        bytes: bytes of the full tensor as compiled.
        note: in which way.
    """

    key: Key
    count: float
    bytes: int
    note: str


@dataclass(frozen=True)
class Pairing:
    """Predicted and compiled collectives, paired.

    Args:
        kept: counts of those that were compiled as they were predicted.
        rewritten: those that XLA did in another way.
        missing: counts of predicted collectives that were not compiled.
        surplus: counts of compiled collectives that were not predicted.
    """

    kept: Mapping[Key, float]
    rewritten: tuple[Rewrite, ...]
    missing: Mapping[Key, float]
    surplus: Mapping[Key, float]

    @property
    def unexplained(self) -> float:
        """Number of collectives left over on both sides."""
        return sum(self.missing.values()) + sum(self.surplus.values())


def paired(
    predicted: Mapping[Key, float],
    compiled: Mapping[Key, float],
    sizes: Mapping[str, int],
    equal: Mapping[Key, float] | None = None,
) -> Pairing:
    """Pairs all collectives, leaving as few over as it can.

    Where conversions were moved, what was compiled from one prediction may have the size of another one. So the largest
    predictions, or the smallest, are also tried first, and given another width where there is none of their own.

    Args:
        predicted: counts of predicted collectives.
        compiled: counts of compiled ones.
        sizes: size of each mesh axis.
        equal: counts of collectives of the lowered program that can be done without.
    """
    pairings = []
    for halves in (None, 0.5, 2.0):
        missing, surplus = dict(predicted), dict(compiled)
        kept: dict[Key, float] = {}
        done: list[Rewrite] = []
        for key in sorted(predicted, key=lambda k: (k[:2], k[2] if halves == 2.0 else -k[2])):
            kept[key] = _taken(missing, surplus, key, key)
            if halves is not None:
                target = (*key[:2], round(key[2] * halves))
                count = _taken(missing, surplus, key, target)
                done += [Rewrite(key, count, target[2], "other width")] if count > _NONE else []
        done += rewrites(missing, surplus, sizes)
        for key in _left(missing):
            count = min(missing[key], (equal or {}).get(key, 0.0))
            if count > _NONE:
                missing[key] -= count
                done.append(Rewrite(key, count, key[2], "done once for several"))
        left = [{k: n for k, n in counts.items() if n > _NONE} for counts in (missing, surplus)]
        pairings.append(Pairing(kept, tuple(done), *left))
    return min(pairings, key=lambda p: p.unexplained)


def _taken(missing: Counts, surplus: Counts, key: Key, target: Key) -> float:
    """Number of ``target`` left for ``key``; takes them out of both."""
    count = min(missing.get(key, 0.0), surplus.get(target, 0.0))
    if count > _NONE:
        missing[key] -= count
        surplus[target] -= count
    return count


def rewrites(predicted: Counts, compiled: Counts, sizes: Mapping[str, int]) -> list[Rewrite]:
    """Pairs predicted collectives with compiled ones of another kind or size that do the same; takes both out.

    Args:
        predicted: counts of predicted collectives that were not found.
        compiled: counts of compiled collectives that were not predicted.
        sizes: size of each mesh axis.
    """
    applied: list[Rewrite] = []
    # What explains all that is left along an axis goes first, and once more when others have taken their part.
    for rule in (_folded, _joined, _one_for_one, _folded, _joined, _axis_by_axis):
        applied += rule(predicted, compiled, sizes)
    return applied


def _left(counts: Counts) -> list[Key]:
    return sorted(key for key, n in counts.items() if n > _NONE)


def _one_for_one(predicted: Counts, compiled: Counts, sizes: Mapping[str, int]) -> Iterator[Rewrite]:
    """Same axes: another width, another kind, or both; the nearest form first."""
    for other_kind in (False, True):
        for halves in (1.0, 0.5, 2.0):
            for key in _left(predicted):
                kind, axis, size = key
                target = (kind, axis, round(size * halves))
                if other_kind:
                    if kind not in ("reduce-scatter", "all-gather"):
                        continue
                    target = ("all-reduce", *target[1:])
                count = min(predicted[key], compiled.get(target, 0.0))
                if count > _NONE:
                    predicted[key] -= count
                    compiled[target] -= count
                    notes = [*(["as all-reduce"] if other_kind else []), *(["other width"] if halves != 1 else [])]
                    yield Rewrite(key, count, target[2], ", ".join(notes))


def _folded(predicted: Counts, compiled: Counts, sizes: Mapping[str, int]) -> Iterator[Rewrite]:
    """All-reduces of the same bytes along several axes, one after the other, done at once."""
    for kind, axis, size in _left(compiled):
        parts = axis.split("+")
        if kind != "all-reduce" or len(parts) < 2 or not all(a in sizes for a in parts):
            continue
        separate = [k for k in _left(predicted) if k[0] == kind and k[1] in parts]
        by_size = {n: [predicted.get((kind, a, n), 0.0) for a in parts] for n in sorted({k[2] for k in separate})}
        even = {n: c[0] for n, c in by_size.items() if c[0] > _NONE and max(c) - min(c) < _NONE}
        alone = even.get(size, 0.0) == compiled[kind, axis, size]
        folded_sizes = {size: even[size]} if alone else even
        if folded_sizes and math.isclose(
            sum(n * c for n, c in folded_sizes.items()), size * compiled[kind, axis, size]
        ):
            compiled[kind, axis, size] = 0.0
            for n, count in folded_sizes.items():
                for a in parts:
                    predicted[kind, a, n] -= count
                    yield Rewrite((kind, a, n), count, n, f"along {axis} at once" + ("" if alone else ", joined"))


def _joined(predicted: Counts, compiled: Counts, sizes: Mapping[str, int]) -> Iterator[Rewrite]:
    """All that is left of a kind along an axis, concatenated."""
    for kind, axis in sorted({k[:2] for k in _left(compiled)}):
        said = [k for k in _left(predicted) if k[:2] == (kind, axis)]
        done = [k for k in _left(compiled) if k[:2] == (kind, axis)]
        fewer = sum(compiled[k] for k in done) < sum(predicted[k] for k in said)
        said_bytes, done_bytes = (sum(k[2] * c[k] for k in keys) for c, keys in ((predicted, said), (compiled, done)))
        if fewer and math.isclose(said_bytes, done_bytes, rel_tol=_PADDING):
            for k in done:
                compiled[k] = 0.0
            for k in said:
                yield Rewrite(k, predicted[k], k[2], "joined")
                predicted[k] = 0.0


def _axis_by_axis(predicted: Counts, compiled: Counts, sizes: Mapping[str, int]) -> Iterator[Rewrite]:
    """One gather or scatter along several axes, done along one after the other."""
    for key in _left(predicted):
        kind, axis, size = key
        parts = axis.split("+")
        if kind not in ("all-gather", "reduce-scatter") or len(parts) < 2:
            continue
        # The last axis is gathered first, and is the last to be scattered.
        phases = [(kind, a, size // math.prod(sizes[b] for b in parts[:i])) for i, a in enumerate(parts)]
        count = min(predicted[key], *(compiled.get(p, 0.0) for p in phases))
        if count > _NONE:
            predicted[key] -= count
            for p in phases:
                compiled[p] -= count
            yield Rewrite(key, count, size, "axis by axis")


def sent(kind: str, size: int, axis: str, sizes: Mapping[str, int]) -> float:
    """Bytes that a device sends in one collective along named axes."""
    return wire_bytes(kind, size, math.prod(sizes[a] for a in axis.split("+")))


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
