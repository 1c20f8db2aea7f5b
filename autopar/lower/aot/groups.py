"""Names of groups of devices: along which axes of the mesh a collective runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.lower.hlo import Groups
from autopar.lower.reshard import exchange

Axes = Sequence[tuple[str, int]]
_Key = frozenset[tuple[int, ...]]


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
