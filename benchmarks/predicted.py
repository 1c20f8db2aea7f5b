"""Predicted collectives and memory next to those of the compiled program.

Counts of a plan and of the HLO differ where XLA joins or splits instructions; bytes on the wire do not. A
collective-permute has groups of two in HLO: source and target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import autopar
from autopar import Plan
from autopar.cost import wire_bytes
from autopar.lower.hlo import HloCollective, collectives
from benchmarks.clusters import bytes_cluster
from benchmarks.footprint import footprint_bytes
from benchmarks.report import Report, Row, Say
from examples import gpt, llama, mlp, moe, wide_resnet

TOLERANCE = 0.05
EXAMPLES = (("mlp", mlp), ("gpt", gpt), ("llama", llama), ("moe", moe), ("wide_resnet", wide_resnet))
MESHES = ((8,), (2, 4))
Totals = dict[str, tuple[float, float]]
"""By kind: count and bytes on the wire of a device."""


def predicted_totals(plan: Plan) -> Totals:
    """What a plan of one stage says."""
    sizes = plan.stages[0].mesh_shape
    return _totals(
        (r.kind, r.count, r.count * wire_bytes(r.kind, r.bytes, math.prod(sizes[a] for a in r.axis.split("+"))))
        for r in plan.communication
    )


def compiled_totals(found: Iterable[HloCollective]) -> Totals:
    """What the HLO says."""
    return _totals((c.kind, c.times, c.wire_bytes) for c in found)


def _totals(records: Iterable[tuple[str, float, float]]) -> Totals:
    totals: Totals = {}
    for kind, count, sent in records:
        before = totals.get(kind, (0.0, 0.0))
        totals[kind] = (before[0] + count, before[1] + sent)
    return totals


def measure(name: str, module: Any, mesh: tuple[int, ...], preset: str = "tiny") -> tuple[Row, tuple[Row, ...]]:
    """The row of an example on a mesh, and its rows by kind."""
    step, args = module.build(preset, abstract=True)
    compiled = autopar.parallelize(step, cluster=bytes_cluster(), mesh_shape=mesh, donate_argnums=0).compile(*args)
    said = predicted_totals(compiled.plan)
    found = compiled_totals(collectives(compiled.as_text()))
    label = {"example": name, "mesh": "x".join(map(str, mesh))}
    nothing = (0.0, 0.0)
    details = tuple(
        {
            **label,
            "kind": kind,
            "predicted count": said.get(kind, nothing)[0],
            "compiled count": found.get(kind, nothing)[0],
            "predicted_bytes": said.get(kind, nothing)[1],
            "compiled_bytes": found.get(kind, nothing)[1],
        }
        for kind in sorted({*said, *found})
    )
    sums = [math.fsum(sent for _, sent in totals.values()) for totals in (said, found)]
    used = footprint_bytes(compiled.memory_analysis())
    row = {
        **label,
        "predicted_bytes": sums[0],
        "compiled_bytes": sums[1],
        "predicted/compiled": sums[0] / sums[1] if sums[1] else None,
        "predicted memory_bytes": compiled.plan.peak_memory,
        "compiled memory_bytes": used,
        "memory predicted/compiled": compiled.plan.peak_memory / used,
    }
    return row, details


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes the perceptron alone."""
    rows: list[Row] = []
    details: list[Row] = []
    for name, module in EXAMPLES[:1] if quick else EXAMPLES:
        for mesh in MESHES:
            say(f"predicted: {name} on {mesh}")
            row, more = measure(name, module, mesh)
            rows.append(row)
            details.extend(more)
    within = all(r["predicted/compiled"] and abs(r["predicted/compiled"] - 1) <= TOLERANCE for r in rows)
    return Report(
        "predicted",
        f"bytes on the wire within {TOLERANCE:.0%}",
        tuple(rows),
        within,
        details=(("collectives by kind", tuple(details)),),
    )
