"""`Verification`: what a plan predicts beside what XLA's compiler made of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autopar.lower.aot.messages import CompiledMemory
from autopar.plan.text import bytes_text, seconds_text, table
from autopar.plan.types import Memory

#: Bytes of all collectives of a kind may differ by this share, and peak memory by that.
BYTES_TOLERANCE, MEMORY_TOLERANCE = 0.02, 0.10


#: Title, header and rows of a table.
_Shown: TypeAlias = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]


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
        rewritten: what XLA did of them in another way, and how: see `autopar.lower.aot.rewrites`. These count as
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


@dataclass(frozen=True)
class Verification:
    """What `autopar.verify` found; prints as a table.

    Args:
        program: name of the function.
        cluster: name of the cluster that the plan was made for.
        target: what was compiled for.
        device_kind: the compiler's name of the devices.
        mesh_axes: (axis, size) of the plan's mesh.
        rows: collectives, those that differ first.
        predicted_memory: bytes a device by kind, as the plan says.
        compiled_memory: bytes a device, as the compiler's buffer assignment has them.
        sent_bytes: bytes that a device sends a step in the collectives of the compiled program as they are.
        predicted_step_s: seconds a step that the plan predicts.
        fusions: fusions of the compiled program.
        cycles: cycles of a step as the compiler estimates them; None where it says none.
        compile_s: seconds that compiling took.
        hlo: the optimized HLO.
    """

    program: str
    cluster: str
    target: str
    device_kind: str
    mesh_axes: tuple[tuple[str, int], ...]
    rows: tuple[CollectiveRow, ...]
    predicted_memory: Memory
    compiled_memory: CompiledMemory
    sent_bytes: float
    predicted_step_s: float
    fusions: int
    cycles: float | None
    compile_s: float = field(compare=False)
    hlo: str = field(default="", repr=False, compare=False)

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
    def memory_ratio(self) -> float:
        """Predicted over compiled peak memory."""
        return self.predicted_memory.total / max(1, self.compiled_memory.total)

    @property
    def lowered_ok(self) -> bool:
        """Whether the program that the compiler is given has exactly the predicted collectives."""
        return all(abs(r.predicted - r.lowered) < 1e-6 for r in self.rows)

    @property
    def collectives_ok(self) -> bool:
        """Whether of every kind as many are compiled as were predicted, with bytes within 2%."""
        return all(t.ok for t in self.totals)

    @property
    def memory_ok(self) -> bool:
        """Whether predicted peak memory is within 10% of the compiled program's."""
        return abs(self.memory_ratio - 1) <= MEMORY_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether collectives and memory are as predicted."""
        return self.collectives_ok and self.memory_ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the HLO."""
        p, c = self.predicted_memory, self.compiled_memory
        return {
            "program": self.program,
            "cluster": self.cluster,
            "target": self.target,
            "device_kind": self.device_kind,
            "mesh": dict(self.mesh_axes),
            "ok": self.ok,
            "lowered_ok": self.lowered_ok,
            "collectives_ok": self.collectives_ok,
            "memory_ok": self.memory_ok,
            "collectives": [{name: getattr(r, name) for name in CollectiveRow.__dataclass_fields__} for r in self.rows],
            "totals": [{name: getattr(t, name) for name in KindTotal.__dataclass_fields__} for t in self.totals],
            "predicted_memory": {k: getattr(p, k) for k in p.__struct_fields__} | {"total": p.total},
            "compiled_memory": {k: getattr(c, k) for k in c.__struct_fields__} | {"total": c.total},
            "predicted_sent_bytes": self.predicted_sent_bytes,
            "compiled_sent_bytes": self.sent_bytes,
            "predicted_step_s": self.predicted_step_s,
            "fusions": self.fusions,
            "cycles": self.cycles,
            "compile_s": self.compile_s,
        }

    def __str__(self) -> str:
        parts = ["\n".join(f"{label + ':':<13}{text}" for label, text in self._head())]
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{table(header, rows)}" if rows else f"{title}: none")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        def cells(tag: str, texts: tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"

        head = "".join(cells("td", pair) for pair in self._head())
        tables = "".join(
            f"<p>{html.escape(title)}</p><table>{cells('th', header)}{''.join(cells('td', r) for r in rows)}</table>"
            for title, header, rows in self._tables()
        )
        return f"<table>{head}</table>{tables}"

    def _head(self) -> tuple[tuple[str, str], ...]:
        mesh = " x ".join(f"{n}@{a}" for a, n in self.mesh_axes)
        cycles = "" if self.cycles is None else f", {self.cycles:.4g} estimated cycles"
        verdict = "lowered as predicted, " if self.lowered_ok else "not lowered as predicted, "
        verdict += "compiled as predicted" if self.collectives_ok else "not compiled as predicted"
        if any(r.rewritten for r in self.rows):
            verdict += ", some rewritten by XLA"
        said, done = bytes_text(self.predicted_sent_bytes), bytes_text(self.sent_bytes)
        memory = "within" if self.memory_ok else "not within"
        return (
            ("program", f"{self.program}, planned for {self.cluster}, mesh {mesh}"),
            ("target", f"{self.target} ({self.device_kind}), compiled in {seconds_text(self.compile_s)}"),
            ("collectives", f"{verdict}; a device sends {said} predicted, {done} compiled"),
            ("memory", f"{memory} {MEMORY_TOLERANCE:.0%}: predicted/compiled {self.memory_ratio:.3f}"),
            ("step time", f"{seconds_text(self.predicted_step_s)} predicted{cycles}"),
            ("fusions", str(self.fusions)),
        )

    def _tables(self) -> tuple[_Shown, ...]:
        both = ("predicted", "compiled")
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
        p, c = self.predicted_memory, self.compiled_memory
        parts = {"arguments": c.arguments, "outputs": c.outputs, "temporaries": c.temporaries, "alias": -c.alias}
        memory = [
            ("predicted", bytes_text(p.total), _listed({k: getattr(p, k) for k in p.__struct_fields__})),
            ("compiled", bytes_text(c.total), _listed(parts)),
        ]
        found: list[_Shown] = [("collectives by kind", ("kind", *both, "bytes sent", "compiled", ""), totals)]
        if different:
            header = ("kind", "axis", "bytes", "predicted", "lowered", "compiled", "for operators", "from")
            found.append(("collectives that differ", header, different))
        if rewritten:
            found.append(("rewritten by XLA", ("kind", "axis", "bytes", "count", "done"), rewritten))
        if joined:
            found.append(("several in one instruction", ("kind", "axis", "bytes", "count", "instructions"), joined))
        found.append(("memory a device", ("", "peak", "of which"), memory))
        return tuple(found)


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items() if n)


def _difference(r: CollectiveRow) -> tuple[str, ...]:
    counts = (f"{r.predicted:g}", f"{r.lowered:g}", f"{r.compiled:g}" + ("" if r.exact else "?"))
    scopes = ", ".join(s.rpartition("shard_map/")[2] for s in r.scopes)
    return (r.kind, r.axis, bytes_text(r.bytes), *counts, ", ".join(r.operators), scopes)
