"""Collectives that XLA replaced by others of the same effect, told from what is left over on both sides.

Compilers rewrite collectives where that is faster on their devices. What was predicted and not found, and what was
found and not predicted, is paired by these rules; each needs the same mesh axes and fitting bytes:

    along ... at once     all-reduce along one axis and then along another, done at once along both
    joined                several small ones concatenated into one
    other width           a conversion to a dtype of half the width (or twice) was moved to the other side
    done once             of several equal ones, or of sums that are added up, one is left
    as all-reduce         reduce-scatter done as all-reduce and slice; all-gather as all-reduce of padded pieces
    axis by axis          one along several axes, done along one after the other

The pairing is by figures alone, as the text of a compiled program does not name what an instruction replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from autopar.cost import wire_bytes

#: Kind, axes in mesh order joined by ``+``, bytes of the full tensor.
Key = tuple[str, str, int]
Counts = MutableMapping[Key, float]

_NONE = 1e-9
#: Pieces that are concatenated may be padded by this share.
_PADDING = 0.005


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
        missing: counts of predicted ones that are left over.
        surplus: likewise compiled ones.
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
    """Pairs what is left over and takes it out of both.

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
        apart = [k for k in _left(predicted) if k[0] == kind and k[1] in parts]
        by_size = {n: [predicted.get((kind, a, n), 0.0) for a in parts] for n in sorted({k[2] for k in apart})}
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
