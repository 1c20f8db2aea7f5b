"""The inner loops of the solver in numpy: for problems so small that loading compiled ones takes longer.

`autopar.solver.compiled` has the same loops compiled; every sum is in the same order, so the same problem gives the
same bits. `is_worth_loading` says which are taken. Loading compiled loops takes half a second, and compiling them five
to ten where the machine has not kept them.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from autopar.solver.kernel_cache import is_kept
from autopar.solver.problem import Array

#: Nodes, and entries of tables, of a problem that numpy solves in less time than compiling takes.
MANY_NODES, MANY_ENTRIES = 4096, 4_000_000
#: Nodes that numpy solves in the half second that loading takes: some 200 sweeps of 18 microseconds a node.
_FEW_NODES = 140


def is_worth_loading(nodes: int, entries: int) -> bool:
    """Whether compiled loops are taken for a problem of so many nodes and entries.

    They are where they are loaded already, where the machine has kept them, or where the problem is large.
    """
    if "autopar.solver.compiled" in sys.modules or nodes > MANY_NODES or entries > MANY_ENTRIES:
        return True
    return nodes > _FEW_NODES and find_spec("numba") is not None and is_kept(os.environ)


def least_sums(vector: Array, table: Array, out: Array) -> None:
    """``out[j] = min_i (own[i] + table[i, j])`` for a table laid out row by row."""
    np.minimum.reduce(vector[:, None] + table.reshape(vector.size, out.size), axis=0, out=out)


def least_of_rows(vector: Array, table: Array, add_to: Array, row: NDArray[np.int64]) -> None:
    """``add_to[j] += min_i (own[i] + table[j, i])``, and in ``row`` the first i that attains it."""
    total = table.reshape(add_to.size, vector.size) + vector
    row[:] = total.argmin(axis=1)
    add_to += total.min(axis=1)


def add(out: Array, row: Array) -> None:
    """``out += row``, of equal lengths."""
    out += row


def add_scaled(out: Array, row: Array, factor: float) -> None:
    """``out += factor * row``, of the first elements of ``out``."""
    out[: row.size] += factor * row


def put(out: Array, row: Array) -> None:
    """``out = row``, of the first elements of ``out``."""
    out[: row.size] = row


def raise_to(out: Array, row: Array, more: float) -> None:
    """``out = maximum(out, row + more)``, of equal lengths."""
    np.maximum(out, row + more, out=out)


def first_least(row: Array) -> int:
    """Index of the least element; the first of several."""
    return int(row.argmin())


def least_differences(costs: Array, add_to: Array) -> None:
    """``add_to[k, i] += min_j (costs[k, j] - costs[i, j])``, over all j at which one of the two is finite."""
    with np.errstate(invalid="ignore"):
        add_to += np.fmin.reduce(costs[:, None, :] - costs[None, :, :], axis=2)
