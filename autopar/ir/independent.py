"""Parts of a graph that need nothing of each other: branches of a model, parameters that an optimizer treats alone.

`independent_branches` finds two towers of a contrastive model, the embeddings and the perceptron of a recommender, the
members of an ensemble. An operator joins branches where the operators that only one of its operands needs are much of
the work (Unity, OSDI'22, and GraphPipe, ASPLOS'25, split graphs at the same places, as series and parallel parts).
`separate_parts` divides operators that share nothing that is computed from given values. Where parts run is decided in
`autopar.search`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Operator

#: Operators by which branches are found: the dearest ones.
_MOST_HEAVY = 512


@dataclass(frozen=True)
class IndependentBranches:
    """A part of a graph with independent branches; each operator is in one of the parts.

    Args:
        trunk: ids of the operators that several branches need, in running order.
        branches: by branch the ids of its operators, that with the most work first.
        weights: by branch the sum of the weights of its operators.
        merge: ids of all others: what joins branches, and comes after.
    """

    trunk: tuple[str, ...]
    branches: tuple[tuple[str, ...], ...]
    weights: tuple[float, ...]
    merge: tuple[str, ...]


def independent_branches(
    operators: Sequence[Operator], weights: Sequence[float], least_share: float
) -> IndependentBranches | None:
    """The branches that save the most if they run at once; None where there are none that save much.

    Args:
        operators: those of a graph, in running order.
        weights: what each takes.
        least_share: of all weights what branches besides the dearest one have at least.
    """
    total = float(sum(weights))
    if total <= 0:
        return None
    flow = _Flow(operators, weights)
    parts = flow.split(range(len(operators)), least_share * total)
    if parts is None:
        return None
    trunk, branches, merge = parts
    branches = sorted(branches, key=lambda b: (-flow.weight(b), b[0]))

    def ids(at: Sequence[int]) -> tuple[str, ...]:
        return tuple(operators[i].id for i in at)

    return IndependentBranches(ids(trunk), tuple(map(ids, branches)), tuple(map(flow.weight, branches)), ids(merge))


def grouped(
    operators: Sequence[Operator], branches: IndependentBranches, groups: Sequence[Sequence[int]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Operators that several branches need, those of each branch, and those that join them; ids in running order.

    What only branches of one group need, or join, belongs to the group.

    Args:
        operators: those that ``branches`` are of, in running order.
        branches: as `independent_branches` finds them.
        groups: numbers of branches.
    """
    trunk, merge = len(groups), len(groups) + 1
    part_of = {**dict.fromkeys(branches.trunk, trunk), **dict.fromkeys(branches.merge, merge)}
    part_of.update({id: g for g, some in enumerate(groups) for b in some for id in branches.branches[b]})
    maker = {v.name: op for op in operators for v in op.results}
    before = set(branches.trunk)
    reached: dict[str, set[int]] = {id: set() for id in part_of}
    for op in reversed(operators):  # of an operator before the branches the parts that need it
        here = reached[op.id] if op.id in before else {part_of[op.id]}
        for name in op.reads:
            if name in maker:
                reached[maker[name].id] |= here
    for op in operators:
        there = {part_of[maker[n].id] for n in op.reads if n in maker}
        others = there - {trunk}
        if op.id in before and len(reached[op.id]) == 1:
            part_of[op.id] = min(reached[op.id])
        elif op.id in before and not reached[op.id]:  # a residual for the backward pass
            part_of[op.id] = min(others, default=trunk)
        elif part_of[op.id] == merge and len(others) == 1:
            part_of[op.id] = min(others)
    parts = [tuple(op.id for op in operators if part_of[op.id] == part) for part in range(len(groups) + 2)]
    return parts[trunk], tuple(parts[: len(groups)]), parts[merge]


#: Numbers of operators: of a trunk, of branches, of what joins them.
_Parts = tuple[list[int], list[list[int]], list[int]]


class _Flow:
    """Dependences between operators, by their numbers."""

    def __init__(self, operators: Sequence[Operator], weights: Sequence[float]) -> None:
        producers = {v.name: i for i, op in enumerate(operators) for v in op.results}
        self.needs = [sorted({producers[n] for n in op.reads if n in producers}) for op in operators]
        self.weights = np.array(weights, float)

    def weight(self, numbers: Sequence[int]) -> float:
        """Sum of the weights of some operators."""
        return float(self.weights[list(numbers)].sum())

    def split(self, numbers: Sequence[int], least: float) -> _Parts | None:
        """Trunk, branches and the rest of some operators; None where branches but the dearest have less than ``least``.

        Around the join that saves most, or the last one that saves enough, whichever is better once branches that are
        themselves joined of branches, by operators that take little, are taken apart.
        """
        splits = [self._flattened(parts, least) for parts in self._joins(numbers, least)]
        return max(splits, key=lambda parts: self._saved(parts[1]), default=None)

    def _saved(self, branches: Sequence[Sequence[int]]) -> float:
        weights = [self.weight(b) for b in branches]
        return sum(weights) - max(weights)

    def _flattened(self, parts: _Parts, least: float) -> _Parts:
        trunk, branches, merge = parts
        flat: list[list[int]] = []
        for branch in branches:
            inner = self.split(branch, least)
            if inner is not None and self.weight([*inner[0], *inner[2]]) < least:
                trunk, merge = [*trunk, *inner[0]], [*merge, *inner[2]]
                flat += inner[1]
            else:
                flat.append(branch)
        return sorted(trunk), flat, sorted(merge)

    def _joins(self, numbers: Sequence[int], least: float) -> list[_Parts]:
        """The parts around the operator that joins the most work, the first of equals, and around the last that joins
        ``least``."""
        inside = {n: k for k, n in enumerate(numbers)}
        needs = [[inside[n] for n in self.needs[i] if n in inside] for i in numbers]
        read = {n for some in needs for n in some}
        needs.append([k for k in range(len(numbers)) if k not in read])  # the end, which joins all that nobody reads
        weights = self.weights[list(numbers)]
        heavy = np.argsort(-weights, kind="stable")[:_MOST_HEAVY]
        column = {int(k): c for c, k in enumerate(heavy) if weights[k] > 0}
        needed = np.zeros((len(needs), len(heavy)), bool)
        roots: dict[str, list[int]] = {}
        best = 0.0
        for k, some in enumerate(needs):
            if len(some) > 1:
                only = self._only(needed[some]) @ weights[heavy]
                gain = float(only.sum() - only.max())
                if gain >= least:
                    large = [n for n, w in zip(some, only, strict=True) if w >= least / len(some)]
                    roots["last"] = large
                    if gain > best * (1 + 1e-9):
                        best, roots["best"] = gain, large
            if some:
                needed[k] = needed[some].any(axis=0)
            if k in column:
                needed[k, column[k]] = True
        around = [roots[name] for name in sorted(roots)]
        return [self._parts(numbers, needs, some) for n, some in enumerate(around) if some not in around[:n]]

    @staticmethod
    def _only(needed: np.ndarray) -> np.ndarray:
        """Heavy operators (columns) that one operand (row) needs and no other does."""
        return np.asarray(needed & (needed.sum(axis=0) == 1), float)

    @staticmethod
    def _parts(numbers: Sequence[int], needs: Sequence[Sequence[int]], roots: Sequence[int]) -> _Parts:
        """Operators that several of ``roots`` need, those that one alone needs, and the rest."""
        reach = [0] * len(needs)
        for bit, root in enumerate(roots):
            reach[root] |= 1 << bit
        for k in range(len(numbers) - 1, -1, -1):
            for n in needs[k]:
                reach[n] |= reach[k]
        parts: list[list[int]] = [[] for _ in range(len(roots) + 2)]
        trunk, merge = len(roots), len(roots) + 1
        part_of: list[int] = []
        for k, (n, bits) in enumerate(zip(numbers, reach, strict=False)):
            if not bits:  # what reads one branch alone, as residuals for its backward pass do, is of that branch
                there = {part_of[m] for m in needs[k]}
                others = there - {trunk}
                part = merge if len(others) > 1 or not there else min(others, default=trunk)
            else:
                part = trunk if bits & (bits - 1) else bits.bit_length() - 1
            part_of.append(part)
            parts[part].append(n)
        return parts[trunk], parts[: len(roots)], parts[merge]


def separate_parts(operators: Sequence[Operator], sources: Collection[str]) -> tuple[tuple[Operator, ...], ...]:
    """Operators by the part that they belong to; those of a part in running order, parts by their first operator.

    Two operators are of one part where one reads what the other makes of the sources, or both read the same source.
    What reads neither a source nor what is computed from one is of no part.

    Args:
        operators: in running order.
        sources: names of values.
    """
    part_of: dict[str, int] = {}
    joined: list[int] = []

    def root(part: int) -> int:
        while joined[part] != part:
            part = joined[part]
        return part

    reached = set(sources)
    members = []
    for op in operators:
        read = [o for o in op.reads if o in reached]
        if not read:
            continue
        part = len(joined)
        joined.append(part)
        for name in read:
            if name in part_of:
                other = root(part_of[name])
                joined[max(other, part)] = min(other, part)
                part = min(other, part)
            part_of[name] = part
        for v in op.results:
            reached.add(v.name)
            part_of[v.name] = part
        members.append((op, part))
    parts: dict[int, list[Operator]] = {}
    for op, part in members:
        parts.setdefault(root(part), []).append(op)
    return tuple(map(tuple, parts.values()))
