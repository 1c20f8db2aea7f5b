"""The inner loops of the solver in numpy: for problems so small that loading compiled ones takes longer.

`autopar.solver.compiled` has the same loops compiled; every sum is in the same order, so the same problem gives the
same bits. `is_worth_loading` says which are taken. Loading compiled loops takes half a second, and compiling them five
to ten where the machine has not kept them.
"""

from __future__ import annotations

import os
import sys

import numpy as np

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
    return nodes > _FEW_NODES and is_kept(os.environ)


def least_sums(vector: Array, table: Array, out: Array) -> None:
    """``out[j] = min_i (own[i] + table[i, j])`` for a table laid out row by row."""
    np.minimum.reduce(vector[:, None] + table.reshape(vector.size, out.size), axis=0, out=out)


def add(out: Array, row: Array) -> None:
    """``out += row``, of equal lengths."""
    out += row


def put(out: Array, row: Array) -> None:
    """``out = row``, of the first elements of ``out``."""
    out[: row.size] = row


def raise_to(out: Array, row: Array, more: float) -> None:
    """``out = maximum(out, row + more)``, of equal lengths."""
    np.maximum(out, row + more, out=out)


def first_least(row: Array) -> int:
    """Index of the least element; the first of several."""
    return int(row.argmin())
