"""Inner loops compiled by numba.

Importing this module loads numba, which takes half a second: what may not need it imports it when it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from autopar._compat.reminders import ACTIVITY
from autopar.solver.kernel_cache import KernelCache, kernel_folder, package_folder, source_hash
from autopar.solver.problem import Array
from autopar.solver.sweeping import Sweep, sweeping

Function = TypeVar("Function", bound=Callable[..., object])

#: Text of the time that a loop takes to compile: some 10 s for those of a first plan.
COMPILING = "compiling loops of the solver for their first use"
_FOLDER = kernel_folder(os.environ)
_SOURCE = source_hash()


class _Compilations(event.Listener):
    """Compilations of loops of the solver, as progress tells of them; those of others are left out."""

    def on_start(self, event: Any) -> None:
        """A loop is not on disk."""
        if _is_own(event):
            ACTIVITY.begin(COMPILING)

    def on_end(self, event: Any) -> None:
        """It is compiled, or cannot be."""
        if _is_own(event):
            ACTIVITY.end()


def _is_own(event: Any) -> bool:
    return isinstance(event.data["dispatcher"]._cache, KernelCache)


event.register("numba:compile", _Compilations())  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """``function`` as machine code that runs without the interpreter's lock."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    # What ``cache=True`` would do, with a cache that processes can share.
    name = f"{function.__module__}.{function.__qualname__}"
    dispatcher._cache = KernelCache(name, _FOLDER, _SOURCE, package_folder())
    return cast(Function, dispatcher)


@compiled
def least_sums(vector: Array, table: Array, out: Array) -> None:
    """``out[j] = min_i (own[i] + table[i, j])`` for a table laid out row by row."""
    size = out.size
    out[:] = np.inf
    for i in range(vector.size):
        add = vector[i]
        at = i * size
        for j in range(size):
            out[j] = min(out[j], add + table[at + j])


@compiled
def least_of_rows(vector: Array, table: Array, add_to: Array, row: NDArray[np.int64]) -> None:
    """``add_to[j] += min_i (own[i] + table[j, i])``, and in ``row`` the first i that attains it."""
    size = vector.size
    for j in range(add_to.size):
        at = j * size
        least, best = np.inf, 0
        for i in range(size):
            total = vector[i] + table[at + i]
            if total < least:
                least, best = total, i
        add_to[j] += least
        row[j] = best


# Whole arrays are added and copied by these loops: numba takes seconds to compile what it does for slices, for the text
# of the error where their lengths differ. Each is compiled once for all who call it.


@compiled
def add(out: Array, row: Array) -> None:
    """``out += row``, of equal lengths."""
    for i in range(out.size):
        out[i] += row[i]


@compiled
def add_scaled(out: Array, row: Array, factor: float) -> None:
    """``out += factor * row``, of the first elements of ``out``."""
    for i in range(row.size):
        out[i] += factor * row[i]


@compiled
def put(out: Array, row: Array) -> None:
    """``out = row``, of the first elements of ``out``."""
    for i in range(row.size):
        out[i] = row[i]


@compiled
def raise_to(out: Array, row: Array, more: float) -> None:
    """``out = maximum(out, row + more)``, of equal lengths."""
    for i in range(out.size):
        out[i] = max(out[i], row[i] + more)


@compiled
def first_least(row: Array) -> int:
    """Index of the least element; the first of several."""
    at = 0
    for i in range(1, row.size):
        if row[i] < row[at]:
            at = i
    return at


@compiled
def least_differences(costs: Array, add_to: Array) -> None:
    """``add_to[k, i] += min_j (costs[k, j] - costs[i, j])``, over all j at which one of the two is finite."""
    count, size = costs.shape
    for k in range(count):
        for i in range(count):
            least = np.inf
            for j in range(size):
                over = costs[k, j] - costs[i, j]
                if over < least:  # false for inf - inf
                    least = over
            add_to[k, i] += least


@compiled
def is_no_sum(costs: Array, noise: float) -> bool:
    """Whether a matrix has inf, or is no row term plus column term."""
    rows, columns = costs.shape
    most = -np.inf
    for i in range(rows):
        for j in range(columns):
            most = max(most, abs(costs[i, j]))
    if np.isinf(most):
        return True
    if min(rows, columns) > 1:
        corner = costs[0, 0] + costs[rows - 1, columns - 1] - costs[0, columns - 1] - costs[rows - 1, 0]
        if abs(corner) > 4 * noise * most:
            return True
    for i in range(rows):
        for j in range(columns):
            if abs(costs[i, j] - costs[i, 0] - (costs[0, j] - costs[0, 0])) > noise * most:
                return True
    return False


@compiled
def least_products(left: Array, right: Array) -> Array:
    """The min-plus product ``out[i, j] = min_k (left[i, k] + right[k, j])``."""
    rows, inner = left.shape
    columns = right.shape[1]
    out = np.full((rows, columns), np.inf)
    for i in range(rows):
        for k in range(inner):
            add = left[i, k]
            for j in range(columns):
                out[i, j] = min(out[i, j], add + right[k, j])
    return out


#: See `autopar.solver.sweeping.sweeping`.
sweep: Sweep = compiled(sweeping(add, first_least, least_sums, put, raise_to))
