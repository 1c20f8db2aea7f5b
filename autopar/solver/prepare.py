"""``python -m autopar.solver.prepare``: compiles the solver's loops ahead of time, for the arguments that planning has.

The code lies with the bytecode of the package, where every process looks that has none in its own folder: a fresh
`AUTOPAR_CACHE_DIR` costs no compilation. `prepare` is where a caller starts. Nothing of it is needed: a loop that was
not prepared is compiled when it first runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_type_hints

from autopar._compat.files import CACHE_VARIABLE


def prepare() -> int:
    """Compiles what is not there yet, into the folder that the environment names; returns how many loops there are."""
    number = 0
    for loop, arguments in _signatures():
        loop.compile(arguments)
        number += 1
    return number


def _signatures() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each loop that Python calls, with the types of its arguments."""
    types: Any = import_module("numba").types
    compiled, sweeping, kernels, trees, peaks, room, packed = (
        import_module(f"autopar.solver.{name}")
        for name in (
            "compiled", "sweeping", "lagrange.kernels", "lagrange.trees", "lagrange.peaks", "lagrange.room",
            "lagrange.packed",
        )
    )  # fmt: skip
    ints, floats, integer, real, marks = types.int64[::1], types.float64[::1], types.int64, types.float64, types.boolean
    by_rows, by_columns = types.float64[:, ::1], types.float64[::1, :]
    known = {"Ints": ints, "Array": floats, "int": integer, "float": real}

    def record(kind: Any) -> Any:
        fields = [known[_name(hint)] for hint in get_type_hints(kind).values()]
        return types.NamedTuple(fields, kind)

    graph, memory, flat = record(packed.PackedGraph), record(packed.PackedMemory), record(sweeping.Flat)
    state, draws = record(trees.State), record(trees.Draws)
    for left in (by_rows, by_columns):
        yield compiled.least_differences, (left, by_rows)
        yield compiled.is_no_sum, (left, real)
        yield compiled.least_products, (left, by_rows)
        yield compiled.least_products, (left, by_columns)
    yield compiled.sweep, (flat, marks, marks, real, real)
    yield kernels.sweep, (graph, floats, floats, marks)
    yield kernels.decode, (graph, floats, floats, marks)
    yield kernels.descend, (graph, floats, ints, integer)
    yield kernels.cost_of, (graph, floats, ints)
    yield kernels.priced, (memory, ints, floats, floats)
    yield kernels.held_by, (memory, ints)
    yield room.keep_what_fits, (memory, ints, types.boolean[::1])
    yield peaks.make_peaks, (floats,)
    yield trees.walk, (graph, memory, floats, floats, state, draws, integer, integer, real)


def _name(hint: Any) -> str:
    """Kind of a field: a number, or an array of numbers."""
    if hint in (int, float):
        return str(hint.__name__)
    return "Ints" if "int" in str(hint) else "Array"


if __name__ == "__main__":
    os.environ[CACHE_VARIABLE] = "off"
    print(f"{prepare()} loops of the solver are compiled")
