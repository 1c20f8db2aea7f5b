"""`Folding`: a walk over the operators of a graph that makes some of them part of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from autopar.ir import Operand, Operator

Params: TypeAlias = Mapping[str, Any]


class Folding:
    """One walk.

    Args:
        operators: of a graph, in running order.
        params_of: jax's parameters of an operator by its id.
        fixed: the value of an operand that depends on no input, else None.
    """

    def __init__(
        self, operators: Sequence[Operator], params_of: Callable[[str], Params], fixed: Callable[[Operand], Any]
    ) -> None:
        self.operators = list(operators)
        self.params_of, self.fixed = params_of, fixed
        self.names: dict[str, str] = {}

    def renamed(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        """Operands under the names that their values have now."""
        return tuple(self.names.get(o, o) if isinstance(o, str) else o for o in operands)

    def taken_up(self, n: int) -> Operator:
        """The operator at a place, which reads values under the names that they have now."""
        op = self.operators[n]
        if any(o in self.names for o in op.reads):
            op = self.operators[n] = replace(op, operands=self.renamed(op.operands))
        return op
