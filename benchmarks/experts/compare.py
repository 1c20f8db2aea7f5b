"""Bytes moved by autopar's compiled programs next to those of the experts'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar import Cluster
from autopar.lower.hlo import HloCollective, collectives
from benchmarks.clusters import bytes_cluster
from benchmarks.experts.base import Expert, compile_expert
from benchmarks.footprint import footprint_bytes
from benchmarks.report import Row


@dataclass(frozen=True)
class Case:
    """A program at a size where experts know the answer.

    Args:
        name: what is asked.
        step: train step.
        args: its arguments, as shapes.
        experts: the candidates.
        cluster: what autopar plans for.
        meshes: mesh shapes that autopar plans for; None is its own choice of the shape.
        memory_limit: bytes a device for all, or None.
    """

    name: str
    step: Any
    args: tuple[Any, Any]
    experts: tuple[Expert, ...]
    cluster: Cluster
    meshes: tuple[tuple[int, ...] | None, ...] = (None,)
    memory_limit: int | None = None


def total_wire_bytes(found: Iterable[HloCollective]) -> float:
    """Bytes that one device sends in all of ``found``."""
    return math.fsum(c.wire_bytes for c in found)


def kinds(found: Sequence[HloCollective]) -> str:
    """Wire bytes by kind, in MB, as text."""
    total: dict[str, float] = {}
    for c in found:
        total[c.kind] = total.get(c.kind, 0.0) + c.wire_bytes
    return ", ".join(f"{kind} {value / 1e6:.3f}" for kind, value in sorted(total.items()) if value)


def corrected_bytes(found: Sequence[HloCollective], gradients: Set[int]) -> float:
    """Wire bytes if all-reduces of gradients that are then split were reduce-scatters: half of their bytes.

    XLA's partitioner on CPU forms no reduce-scatter; on GPU and TPU it does.

    Args:
        found: the collectives of an expert's program.
        gradients: `split_sizes` of the expert. An all-reduce of another value of such a size counts half too,
            which favours the expert.
    """
    halves = [c for c in found if c.kind == "all-reduce" and c.full_bytes in gradients]
    return total_wire_bytes(found) - total_wire_bytes(halves) / 2


def split_sizes(expert: Expert, state: Any) -> frozenset[int]:
    """Bytes of the state leaves that an expert splits, and of one layer of those that hold many (for a scan)."""
    sizes: set[int] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        spec = expert.weights(jax.tree_util.keystr(path), leaf.shape)
        if any(spec):
            whole = math.prod(leaf.shape) * leaf.dtype.itemsize
            sizes |= {whole} if spec[0] else {whole, whole // leaf.shape[0]}
    return frozenset(sizes)


def measure_expert(case: Case, expert: Expert) -> Row:
    """The row of an expert."""
    compiled = compile_expert(expert, case.step, case.args)
    found = collectives(compiled.as_text())
    used = footprint_bytes(compiled.memory_analysis())
    # Of programs that hold every weight in full in the end nothing is a reduce-scatter.
    gradients = split_sizes(expert, case.args[0]) if expert.name.startswith("FSDP") else frozenset()
    return {
        "case": case.name,
        "who": expert.name,
        "mesh": "x".join(map(str, expert.mesh)),
        "wire_bytes": total_wire_bytes(found),
        "corrected_bytes": corrected_bytes(found, gradients),
        "memory_bytes": used,
        "MB by kind": kinds(found),
    }


def measure_autopar(case: Case, mesh: tuple[int, ...] | None, whole_s: float) -> Row:
    """The row of autopar. ``whole_s`` is the predicted time of all arithmetic on one device."""
    function = autopar.parallelize(
        case.step, cluster=case.cluster, mesh_shape=mesh, memory_limit=case.memory_limit, donate_argnums=0
    )
    compiled = function.compile(*case.args)
    (stage,) = compiled.plan.stages
    found = collectives(compiled.as_text())
    return {
        "case": case.name,
        "who": "autopar" if mesh is not None else "autopar, any mesh",
        "mesh": "x".join(str(n) for n in stage.mesh_shape.values()),
        "wire_bytes": total_wire_bytes(found),
        "corrected_bytes": total_wire_bytes(found),
        "memory_bytes": footprint_bytes(compiled.memory_analysis()),
        "MB by kind": kinds(found),
        "arithmetic split": whole_s / stage.compute_time / 8,
    }


def one_device_s(case: Case) -> float:
    """Predicted seconds of the arithmetic of a case on one device."""
    alone = bytes_cluster(devices=1)
    return float(autopar.parallelize(case.step, cluster=alone).plan(*case.args).stages[0].compute_time)


def compare(case: Case) -> tuple[Row, ...]:
    """Rows of a case: the experts by rising bytes, then autopar."""
    experts = sorted((measure_expert(case, e) for e in case.experts), key=lambda r: r["wire_bytes"])
    whole = one_device_s(case)
    return (*experts, *(measure_autopar(case, mesh, whole) for mesh in case.meshes))


def verdict(case: Case, rows: tuple[Row, ...]) -> Row:
    """The best expert (of those within the memory limit) and autopar in one line."""
    limit = case.memory_limit
    fitting = [
        r for r in rows if not r["who"].startswith("autopar") and (limit is None or r["memory_bytes"] <= 1.1 * limit)
    ]
    own = min((r for r in rows if r["who"].startswith("autopar")), key=lambda r: r["wire_bytes"])
    best = min(fitting, key=lambda r: r["wire_bytes"], default=None)
    corrected = min((r["corrected_bytes"] for r in fitting), default=None)
    return {
        "case": case.name,
        "best expert": None if best is None else f"{best['who']} ({best['mesh']})",
        "expert_bytes": None if best is None else best["wire_bytes"],
        "corrected expert_bytes": corrected,
        "autopar mesh": own["mesh"],
        "autopar_bytes": own["wire_bytes"],
        "autopar/expert": None if best is None or not best["wire_bytes"] else own["wire_bytes"] / best["wire_bytes"],
        "autopar/corrected": own["wire_bytes"] / corrected if corrected else None,
        "arithmetic split": own["arithmetic split"],
        "holds": best is None or own["wire_bytes"] <= best["wire_bytes"],
    }
