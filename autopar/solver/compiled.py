"""Inner loops compiled by numba; the same functions in numpy where numba is missing, some hundred times as slow.

Importing this module loads numba, which takes half a second: what may not need it imports it when it does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.solver import plain
from autopar.solver.kernel_cache import KernelCache, kernel_folder, package_folder, source_hash
from autopar.solver.problem import Array
from autopar.solver.sweeping import Sweep, sweeping

Function = TypeVar("Function", bound=Callable[..., object])

#: What it means that numba is missing.
MISSING = (
    "numba is not installed: the inner loops of the solver run in numpy, some hundred times as slow, and answers "
    "within a time limit are worse by a tenth to a half; pip install numba"
)

#: Whether numba is there.
COMPILED = find_spec("numba") is not None

_FOLDER = kernel_folder(os.environ)
_SOURCE = source_hash() if COMPILED else ""

if not COMPILED:
    warnings.warn(MISSING, RuntimeWarning, stacklevel=2)


def compiled(function: Function) -> Function:
    """``function`` as machine code that runs without the interpreter's lock; itself without numba."""
    if not COMPILED:
        return function
    dispatcher: Any = import_module("numba").njit(nogil=True)(function)
    # What ``cache=True`` would do, with a cache that processes can share.
    name = f"{function.__module__}.{function.__qualname__}"
    dispatcher._cache = KernelCache(name, _FOLDER, _SOURCE, package_folder())
    return cast(Function, dispatcher)


def _least_sums(vector: Array, table: Array, out: Array) -> None:
    size = out.size
    out[:] = np.inf
    for i in range(vector.size):
        add = vector[i]
        at = i * size
        for j in range(size):
            out[j] = min(out[j], add + table[at + j])


def _least_of_rows(vector: Array, table: Array, add_to: Array, row: NDArray[np.int64]) -> None:
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


def _add(out: Array, row: Array) -> None:
    for i in range(out.size):
        out[i] += row[i]


def _add_scaled(out: Array, row: Array, factor: float) -> None:
    for i in range(row.size):
        out[i] += factor * row[i]


def _put(out: Array, row: Array) -> None:
    for i in range(row.size):
        out[i] = row[i]


def _raise_to(out: Array, row: Array, more: float) -> None:
    for i in range(out.size):
        out[i] = max(out[i], row[i] + more)


def _first_least(row: Array) -> int:
    at = 0
    for i in range(1, row.size):
        if row[i] < row[at]:
            at = i
    return at


def _least_differences(costs: Array, add_to: Array) -> None:
    count, size = costs.shape
    for k in range(count):
        for i in range(count):
            least = np.inf
            for j in range(size):
                over = costs[k, j] - costs[i, j]
                if over < least:  # false for inf - inf
                    least = over
            add_to[k, i] += least


def _is_no_sum(costs: Array, noise: float) -> bool:
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


def _least_products(left: Array, right: Array) -> Array:
    rows, inner = left.shape
    columns = right.shape[1]
    out = np.full((rows, columns), np.inf)
    for i in range(rows):
        for k in range(inner):
            add = left[i, k]
            for j in range(columns):
                out[i, j] = min(out[i, j], add + right[k, j])
    return out


#: ``out[j] = min_i (own[i] + table[i, j])`` for a table laid out row by row.
least_sums: Callable[[Array, Array, Array], None] = compiled(_least_sums) if COMPILED else plain.least_sums

#: ``add_to[j] += min_i (own[i] + table[j, i])``, and in ``row`` the first i that attains it.
least_of_rows: Callable[[Array, Array, Array, NDArray[np.int64]], None] = (
    compiled(_least_of_rows) if COMPILED else plain.least_of_rows
)

# Whole arrays are added and copied by these loops: numba takes seconds to compile what it does for slices, for the text
# of the error where their lengths differ. Each is compiled once for all who call it.

#: ``out += row``, of equal lengths.
add: Callable[[Array, Array], None] = compiled(_add) if COMPILED else plain.add

#: ``out += factor * row``, of the first elements of ``out``.
add_scaled: Callable[[Array, Array, float], None] = compiled(_add_scaled) if COMPILED else plain.add_scaled

#: ``out = row``, of the first elements of ``out``.
put: Callable[[Array, Array], None] = compiled(_put) if COMPILED else plain.put

#: ``out = maximum(out, row + more)``, of equal lengths.
raise_to: Callable[[Array, Array, float], None] = compiled(_raise_to) if COMPILED else plain.raise_to

#: Where the least element is; the first of several.
first_least: Callable[[Array], int] = compiled(_first_least) if COMPILED else plain.first_least

#: ``add_to[k, i] += min_j (costs[k, j] - costs[i, j])``, over all j at which one of the two is finite.
least_differences: Callable[[Array, Array], None] = (
    compiled(_least_differences) if COMPILED else plain.least_differences
)

#: Whether a matrix has inf, or is no row term plus column term; None without numba.
is_no_sum: Callable[[Array, float], bool] | None = compiled(_is_no_sum) if COMPILED else None

#: The min-plus product ``out[i, j] = min_k (left[i, k] + right[k, j])``; None without numba.
least_products: Callable[[Array, Array], Array] | None = compiled(_least_products) if COMPILED else None

#: See `autopar.solver.sweeping.sweeping`.
sweep: Sweep = compiled(sweeping(add, first_least, least_sums, put, raise_to))
