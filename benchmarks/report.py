"""`Report`: what a benchmark found, as a table and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]
Say = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Args:
        name: of the benchmark.
        target: what must hold, in words; "" where nothing is asked.
        rows: one mapping from column to value a line; a value may be text, a number, a bool or None.
        passed: whether the target is met.
        notes: lines to read with the table.
        details: more tables by title, as rows.
        measured: columns, of all tables, with seconds that were measured here; other seconds are predicted.
    """

    name: str
    target: str
    rows: tuple[Row, ...]
    passed: bool
    notes: tuple[str, ...] = ()
    details: tuple[tuple[str, tuple[Row, ...]], ...] = ()
    measured: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def table(title: str, rows: tuple[Row, ...], measured: tuple[str, ...] = (), reference_s: float = 0.0) -> Table:
    """A table of ``rows``; the columns are the keys, in the order in which they first appear.

    Args:
        title: above it.
        rows: its lines.
        measured: columns of seconds that are also shown as multiples of ``reference_s``.
        reference_s: see `benchmarks.reference`.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    made = Table(title=title, title_justify="left", show_lines=False)
    for column in columns:
        number = any(isinstance(row.get(column), int | float) and not isinstance(row.get(column), bool) for row in rows)
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(
            *(
                cell(column, row.get(column)) + (multiple(row.get(column), reference_s) if column in measured else "")
                for column in columns
            )
        )
    return made


def multiple(seconds: Any, reference_s: float) -> str:
    """Seconds as so many times the reference, in brackets; "" where there are none."""
    return f" ({seconds / reference_s:.3g} ref)" if isinstance(seconds, int | float) and reference_s > 0 else ""


def cell(column: str, value: Any) -> str:
    """A value as text; columns whose names end in ``_bytes`` are sizes, in ``_s`` seconds."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell('', of_key)}" for key, of_key in value.items())
    if isinstance(value, list | tuple):
        return " ".join(cell(column, one) for one in value)
    if column.endswith("_bytes"):
        return size(value)
    if column.endswith("_s"):
        return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.3f} ms"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"


def size(value: float) -> str:
    """Bytes as text, in powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value:.0f} B"
