"""Rows of predicted and compiled collectives, and what is said of all of them."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.plan.columns import columns, labelled, table
from autopar.plan.text import bytes_text

#: Bytes of all collectives of a kind may differ by this share.
BYTES_TOLERANCE = 0.02

#: Title, header and rows of a table.
Shown: TypeAlias = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind, axis and size.

    Args:
        kind: as in a plan's records.
        axis: mesh axes, joined by ``+`` in the order of the mesh; of groups that no axes make, their number and size.
        bytes: of the full tensor, as seen by one group.
        predicted: how many a step the plan says.
        lowered: how many the program runs as it is given to the compiler.
        compiled: how many the compiled program runs.
        predicted_wire_bytes: bytes that a device sends in all of the predicted ones.
        compiled_wire_bytes: likewise, of the compiled ones.
        instructions: instructions that the compiled ones are in, as XLA joins several in one; 0 where some were
            rewritten.
        rewritten: what XLA did of them in another way, and how: see `autopar.lower.aot.collectives`. These count as
            compiled, with the bytes that such a collective of the compiled width would send.
        operators: ids of operators that need the predicted ones, at most a few.
        scopes: jax's name stack of compiled ones, at most a few.
        exact: whether ``compiled`` is certain: not in a branch or a loop of unknown length.
    """

    kind: str
    axis: str
    bytes: int
    predicted: float
    lowered: float
    compiled: float
    predicted_wire_bytes: float
    compiled_wire_bytes: float
    instructions: int
    rewritten: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    exact: bool = True

    @property
    def ok(self) -> bool:
        """Whether as many are lowered and compiled as were predicted."""
        return max(abs(self.predicted - self.lowered), abs(self.predicted - self.compiled)) < 1e-6


@dataclass(frozen=True)
class KindTotal:
    """All collectives of one kind.

    Args:
        kind: as in a plan's records.
        predicted: how many a step the plan says.
        compiled: how many the compiled program runs.
        predicted_wire_bytes: bytes that a device sends, as predicted.
        compiled_wire_bytes: likewise, compiled.
    """

    kind: str
    predicted: float
    compiled: float
    predicted_wire_bytes: float
    compiled_wire_bytes: float

    @property
    def ok(self) -> bool:
        """Whether counts are equal and bytes within `BYTES_TOLERANCE`."""
        near = abs(self.predicted_wire_bytes - self.compiled_wire_bytes)
        return abs(self.predicted - self.compiled) < 1e-6 and near <= BYTES_TOLERANCE * self.predicted_wire_bytes


class ComparedCollectives:
    """Predicted and compiled collectives, with their totals.

    Args:
        rows: collectives, those that differ first.
    """

    rows: tuple[CollectiveRow, ...]

    @property
    def totals(self) -> tuple[KindTotal, ...]:
        """Collectives by kind, in the order of their names."""
        return tuple(
            KindTotal(
                kind,
                sum(r.predicted for r in self.rows if r.kind == kind),
                sum(r.compiled for r in self.rows if r.kind == kind),
                sum(r.predicted_wire_bytes for r in self.rows if r.kind == kind),
                sum(r.compiled_wire_bytes for r in self.rows if r.kind == kind),
            )
            for kind in sorted({r.kind for r in self.rows})
        )

    @property
    def predicted_sent_bytes(self) -> float:
        """Bytes that a device sends a step, as the plan says."""
        return sum(r.predicted_wire_bytes for r in self.rows)

    @property
    def lowered_ok(self) -> bool:
        """Whether the program that the compiler is given has exactly the predicted collectives."""
        return all(abs(r.predicted - r.lowered) < 1e-6 for r in self.rows)

    @property
    def collectives_ok(self) -> bool:
        """Whether of every kind as many are compiled as were predicted, with bytes within 2%."""
        return all(t.ok for t in self.totals)

    @property
    def explained(self) -> bool:
        """Whether every collective is as predicted, or was rewritten by XLA in a way that is known and named."""
        return all(r.ok for r in self.rows)

    def collectives_dict(self) -> dict[str, Any]:
        """The rows and totals as plain data for JSON."""
        return {
            "lowered_ok": self.lowered_ok,
            "collectives_ok": self.collectives_ok,
            "explained": self.explained,
            "collectives": [{name: getattr(r, name) for name in CollectiveRow.__dataclass_fields__} for r in self.rows],
            "totals": [{name: getattr(t, name) for name in KindTotal.__dataclass_fields__} for t in self.totals],
        }

    def collectives_verdict(self) -> str:
        """In a few words, whether they are as predicted."""
        verdict = "lowered as predicted, " if self.lowered_ok else "not lowered as predicted, "
        if self.collectives_ok:
            rewritten = ", some rewritten by XLA" if any(r.rewritten for r in self.rows) else ""
            return f"{verdict}compiled as predicted{rewritten}"
        return verdict + ("compiled as XLA rewrote them" if self.explained else "not compiled as predicted")

    def collectives_tables(self) -> list[Shown]:
        """Totals by kind, then what differs, what XLA rewrote and what it joined, where there is any."""
        totals = [
            (
                t.kind, f"{t.predicted:g}", f"{t.compiled:g}", bytes_text(t.predicted_wire_bytes),
                bytes_text(t.compiled_wire_bytes), "" if t.ok else "differs",
            )
            for t in self.totals
        ]  # fmt: skip
        different = [_difference(r) for r in self.rows if not r.ok]
        rewritten = [
            (r.kind, r.axis, bytes_text(r.bytes), f"{r.predicted:g}", "; ".join(r.rewritten))
            for r in self.rows
            if r.rewritten
        ]
        joined = [
            (r.kind, r.axis, bytes_text(r.bytes), f"{r.compiled:g}", str(r.instructions))
            for r in self.rows
            if r.ok and 0 < r.instructions < r.compiled and r.exact
        ]
        tables: list[Shown] = [
            ("collectives by kind", ("kind", "predicted", "compiled", "bytes sent", "compiled", ""), totals)
        ]
        if different:
            header = ("kind", "axis", "bytes", "predicted", "lowered", "compiled", "for operators", "from")
            tables.append(("collectives that differ", header, different))
        if rewritten:
            tables.append(("rewritten by XLA", ("kind", "axis", "bytes", "count", "done"), rewritten))
        if joined:
            tables.append(("several in one instruction", ("kind", "axis", "bytes", "count", "instructions"), joined))
        return tables


def _difference(r: CollectiveRow) -> tuple[str, ...]:
    counts = (f"{r.predicted:g}", f"{r.lowered:g}", f"{r.compiled:g}" + ("" if r.exact else "?"))
    scopes = ", ".join(s.rpartition("shard_map/")[2] for s in r.scopes)
    return (r.kind, r.axis, bytes_text(r.bytes), *counts, ", ".join(r.operators), scopes)


def listed(parts: Mapping[str, int]) -> str:
    """Bytes by name as text, those that are none left out."""
    return ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items() if n)


class ShownVerification(ABC):
    """A verification that is shown as labelled lines and tables, on a terminal and in a notebook."""

    @abstractmethod
    def _head(self) -> tuple[tuple[str, str], ...]:
        """(label, text) of each line."""

    @abstractmethod
    def _tables(self) -> Sequence[Shown]:
        """The tables."""

    def __str__(self) -> str:
        parts = [labelled(self._head(), 13, columns())]
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{table(header, rows)}" if rows else f"{title}: none")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        def cells(tag: str, texts: tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"

        top = "".join(cells("td", pair) for pair in self._head())
        shown = "".join(
            f"<p>{html.escape(title)}</p><table>{cells('th', header)}{''.join(cells('td', r) for r in rows)}</table>"
            for title, header, rows in self._tables()
        )
        return f"<table>{top}</table>{shown}"
