"""Constraints in the integer program: what is left of the layouts of an input, and of the strategies of an operator."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cluster import LogicalMesh
from autopar.ir import Layout, Operator
from autopar.search.constraints import Constraint, keeps, shards_of
from autopar.search.intra.operators import OperatorOptions


def constrained(
    constraints: Mapping[str, Constraint], name: str, layouts: tuple[Layout, ...], mesh: LogicalMesh
) -> tuple[Layout, ...]:
    """The ``layouts`` of an input that keep the constraint on it; none where it cannot hold on ``mesh``.

    Args:
        constraints: by the name of the input.
        name: of the input.
        layouts: that the input may have.
        mesh: where.
    """
    constraint = constraints.get(name)
    if constraint is None:
        return layouts
    return tuple(k for k in layouts if constraint.holds(k, mesh.sizes))


def asked(op: Operator, options: OperatorOptions, mesh: LogicalMesh) -> tuple[OperatorOptions, str]:
    """Strategies of ``op`` under the layout that the user's code asks for, and a line on whether it is kept.

    Where nothing is said the line is empty; where ``mesh`` cannot say it ``options`` are as they were.
    """
    wanted = shards_of(op)
    if wanted is None:
        return options, ""
    kept = tuple(s for s in options.strategies if keeps(wanted, s.result_layouts[0], mesh.sizes))
    shards = ", ".join("any" if n < 0 else str(n) for n in wanted)
    said = "kept" if kept else f"not kept: the mesh {mesh} cannot say it"
    note = f"{op.primitive} to {shards} shards by dim ({op.source or op.id}): {said}"
    return (options.only(kept) if kept else options), note
