"""Details of a plan's operators, from the graph that it was made for."""

from __future__ import annotations

from msgspec.structs import replace

from autopar.ir import Graph
from autopar.plan.details import Details, OperatorDetail
from autopar.sharding.forms import every_operator, form_of


def with_operators(details: Details, graph: Graph) -> Details:
    """``details`` with the line and the form of every operator of ``graph``."""
    operators = tuple(OperatorDetail(id, op.source, form_of(op, types)) for id, op, types in every_operator(graph))
    return replace(details, operators=operators)
