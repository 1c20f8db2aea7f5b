"""Whether an operator can run on one microbatch's pieces, given what its operands are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster.mesh import LogicalMesh
from autopar.ir import Layout, Literal, Operator, TensorType
from autopar.sharding import Strategy, rule_for, strategies


@dataclass(frozen=True)
class Match:
    """Layouts over the axis of microbatches in which an operator runs; None for literals."""

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


def whole(type: TensorType) -> Layout:
    """The layout of a value that is the same in every microbatch."""
    return Layout.replicated(type.rank)


def match(
    op: Operator,
    types: tuple[TensorType, ...],
    states: Sequence[Layout | None],
    zeros: Sequence[bool],
    mesh: LogicalMesh,
    *,
    terms: bool = False,
) -> Match | None:
    """Layouts of operands and results in which ``op`` runs on one microbatch; None where it mixes microbatches.

    Args:
        op: an operator without regions, of which some operand is split or partial.
        types: types of its operands.
        states: state of each operand; None for literals.
        zeros: whether each operand is known to be zero.
        mesh: of one axis, whose positions are the microbatches.
        terms: whether what is the same in every microbatch may stand for a term of a sum: itself in the first
            microbatch, zero in the others.
    """
    if op.effects:
        return None
    allowed = [True] * len(zeros) if terms else zeros
    fitting = [s for s in _strategies(op, types, mesh)[1:] if _fits(s, states, allowed)]
    if not fitting:
        return None
    # Of several (an operand that is the same in every microbatch may be cut or not) the one that cuts least.
    best = min(fitting, key=lambda s: sum(_cut(k, w) for k, w in zip(states, s.operand_layouts, strict=True)))
    return _as_match(op, best)


def local_match(op: Operator, types: tuple[TensorType, ...], result: Layout, mesh: LogicalMesh) -> Match | None:
    """Layouts in which ``op``, whose operands are the same in every microbatch, computes its part ``result`` alone."""
    if op.effects or op.regions or len(op.results) != 1:
        return None
    for s in _strategies(op, types, mesh)[1:]:
        if s.result_layouts[0] == result and not any(k.partial for k in s.operand_layouts):
            return _as_match(op, s)
    return None


def _strategies(op: Operator, types: tuple[TensorType, ...], mesh: LogicalMesh) -> tuple[Strategy, ...]:
    rule, _ = rule_for(op, types)
    return strategies(rule, types, tuple(v.type for v in op.results), mesh)


def _as_match(op: Operator, s: Strategy) -> Match:
    operands = zip(op.operands, s.operand_layouts, strict=True)
    return Match(
        tuple(None if isinstance(o, Literal) and k.is_replicated else k for o, k in operands), s.result_layouts
    )


def _fits(s: Strategy, states: Sequence[Layout | None], zeros: Sequence[bool]) -> bool:
    return all(_fit(k, w, z) for k, w, z in zip(states, s.operand_layouts, zeros, strict=True))


def _fit(state: Layout | None, wanted: Layout, zero: bool) -> bool:
    """Whether a value in ``state`` can be taken as ``wanted`` within one microbatch."""
    if state is None or state.is_replicated:
        return not wanted.partial or (zero and wanted.reduce == "sum")
    return state == wanted


def _cut(state: Layout | None, wanted: Layout) -> bool:
    return state is not None and state.is_replicated and not wanted.is_replicated
